"""Turns a folder with a text encoder's safetensors into one that ONNX Runtime loads: `model.onnx`, configuration, tokenizer.

    python -m infra.export_onnx FOLDER/model.safetensors TARGET

The model takes `input_ids` and `attention_mask`, INT64 [batch, length], and gives `last_hidden_state`, FP32 [batch, length, d]. A
program of its own, because it imports torch, and because its memory goes back when it ends. Prints one line a step.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OPSET = 17
DIFFERENCE_MAX = 1e-4


def export(source: Path, target: Path) -> None:
    """Writes the model in the folder `source` to the folder `target`. Raises what torch raises, and SystemExit if the values differ."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    say("loading the model library")
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()

    class Encoder(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]

    say("loading the weights")
    encoder = Encoder().eval()
    say("writing the ONNX file")
    ids = torch.tensor([[101, 2023, 2003, 102], [101, 2000, 102, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    names = ("input_ids", "attention_mask", "last_hidden_state")
    torch.onnx.export(
        encoder,
        (ids, mask),
        str(target / "model.onnx"),
        dynamo=False,  # the other exporter writes a file that ONNX Runtime refuses
        input_names=list(names[:2]),
        output_names=list(names[2:]),
        dynamic_axes={name: {0: "batch", 1: "length"} for name in names},
        opset_version=OPSET,
    )
    encoder.eval()  # the exporter leaves it in training mode
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    say("comparing it with the model")
    _compare(encoder, target / "model.onnx")


def _compare(encoder: Any, path: Path) -> None:
    """Of another batch and length than it was traced with."""
    import onnxruntime
    import torch

    ids = torch.arange(1_000, 1_021).reshape(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] + [0] * 6])
    with torch.no_grad():
        wanted = encoder(ids, mask).numpy()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    difference = float(abs((found - wanted) * mask.numpy()[..., None]).max())
    if not difference < DIFFERENCE_MAX:
        raise SystemExit(f"the exported model's values differ from the model's by {difference}")


def say(text: str) -> None:
    """Prints a step at once."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C reaches it too: it ends without a traceback
    export(Path(sys.argv[1]).parent, Path(sys.argv[2]))
