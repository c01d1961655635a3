"""Turns a GGUF file into a folder that any engine loads: safetensors in bfloat16, configuration, tokenizer, chat template.

    python -m infra.extract_model MODEL.gguf FOLDER

A program of its own, because it imports torch, and because its memory goes back when it ends. Prints one line a step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def extract(source: Path, target: Path) -> None:
    """Writes the model in `source` to the folder `target`. Raises what transformers raises."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    say("loading the model library")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    say("dequantising the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    say("writing safetensors")
    model.save_pretrained(target)
    say("writing the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def say(text: str) -> None:
    """Prints a step at once."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C reaches it too: it ends without a traceback
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
