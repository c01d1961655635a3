"""Tokenizers made in tests: of arbitrary pieces, and directories that hold a tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import Tokenizer as FastTokenizer


class PieceTokenizer:
    """Token i stands for `pieces[i]`; ids in `special` are special. So tokens split bytes in whatever way a test likes."""

    bos: str | None = None
    eos: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    chat_template: str | None = None

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        special: frozenset[int] = frozenset(),
        strips_leading_space: bool = False,
    ) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.eos_token_ids = eos_token_ids
        self.special = special
        self.strips_leading_space = strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


def save_tokenizer(folder: Path, tokenizer: FastTokenizer, **config: object) -> Path:
    """Write a model directory that holds a tokenizer alone."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
