"""Tokenizers behind one small port: text to ids, and an id to the exact bytes it stands for.

`HfTokenizer` reads a Hugging Face model directory with the `tokenizers` library alone. `ByteTokenizer` has one token
a UTF-8 byte and belongs to the scripted engine. `load_tokenizer` chooses between them and caches what it loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from schemas.errors import HeadraceError
from schemas.reasons import Reason

CACHED_TOKENIZERS = 16
BYTES_REF = "bytes"

_SPACE_MARK = "▁"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What admission, workers and the bridge need of a tokenizer. Implementations are immutable and thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to `vocab_size - 1`, added tokens included."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""

    @property
    def bos(self) -> str | None:
        """Text of the token that begins a sequence."""

    @property
    def eos(self) -> str | None:
        """Text of the token that ends a sequence."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Named special tokens as a chat template sees them: `bos_token`, `eos_token`, `pad_token`, …"""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that renders a chat to a prompt."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops one space at the very beginning of a text (SentencePiece's dummy prefix)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises HeadraceError (invalid_request) when it isn't valid Unicode, or has no tokens here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to an answer; of a special token, its text; of an unknown id, none."""

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a control token that readers aren't shown."""


class ByteTokenizer:
    """One token a UTF-8 byte: ids 0 to 255; 256 is the end. A chat's prompt is its last user message, unchanged."""

    vocab_size = 257
    eos_token_id = 256
    eos_token_ids = frozenset({256})
    bos = None
    eos = "<eos>"
    special_tokens: Mapping[str, str] = {"eos_token": "<eos>"}
    strips_leading_space = False
    chat_template = (
        "{%- set last = messages | last -%}"
        "{%- if last and last.role != 'user' -%}{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}{%- endif -%}"
        "{%- if not last -%}{{ raise_exception('a chat needs a message of the user') }}{%- endif -%}"
        "{{ last.content }}"
    )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 - the port's signature
        """The bytes of `text`; there are no special tokens to add."""
        return list(valid_unicode(text))

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself."""
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return self.eos.encode() if token_id == self.eos_token_id else b""

    def is_special(self, token_id: int) -> bool:
        """True of the end alone."""
        return token_id == self.eos_token_id


class HfTokenizer:
    """A tokenizer of a Hugging Face model directory (`tokenizer.json` and the configuration beside it)."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        *,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        """Take over `tokenizer`, which must decode by byte-level BPE or in SentencePiece's manner."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.bos = special_tokens.get("bos_token")
        self.eos = special_tokens.get("eos_token")
        kinds = _decoder_steps(json.loads(tokenizer.to_str()).get("decoder"))
        self.strips_leading_space = _strips_leading_space(kinds)
        self._special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._bytes = _byte_table(tokenizer, self._special, {kind["type"]: kind for kind in kinds})
        self.vocab_size = len(self._bytes)

    @classmethod
    def from_dir(cls, path: Path) -> HfTokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` (else `config.json`) and the chat
        template of the directory `path`. Raises HeadraceError (internal_error) when it holds no usable tokenizer.
        """
        try:
            return cls._read(path)
        except HeadraceError:
            raise
        except Exception as error:  # the library raises bare Exception, and a file may hold anything
            raise HeadraceError(Reason.INTERNAL_ERROR, f"{path} holds no usable tokenizer: {error}") from error

    @classmethod
    def _read(cls, path: Path) -> HfTokenizer:
        tokenizer = FastTokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_padding()  # a text's tokens are its own, all of them, whatever its trainers cut or padded to
        tokenizer.no_truncation()
        config = _read_json(path / "tokenizer_config.json")
        special_tokens = _special_tokens({**_read_json(path / "special_tokens_map.json"), **config})
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(path, tokenizer, special_tokens.get("eos_token")),
            special_tokens=special_tokens,
            chat_template=_chat_template(path, config),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in `text` count as such."""
        valid_unicode(text)
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises bare Exception, as for a character that no token stands for
            raise HeadraceError(
                Reason.INVALID_REQUEST, f"the model's tokenizer can't take this text: {error}"
            ) from error
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to an answer."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether `tokenizer.json` marks the token as special."""
        return token_id in self._special


@lru_cache(maxsize=CACHED_TOKENIZERS)
def load_tokenizer(ref: str) -> Tokenizer:
    """The tokenizer that `ref` names: a directory's path, or the word `bytes`. A model version's files never change."""
    if ref == BYTES_REF:
        return ByteTokenizer()
    with no_panic("the tokenizer's files make `tokenizers` fail"):
        return HfTokenizer.from_dir(Path(ref))


class no_panic:  # noqa: N801  # reads as what it does; a generator would cost more than some inputs
    """A panic in `tokenizers`, which is no Exception and would end the process, becomes HeadraceError (internal_error) with this text."""

    def __init__(self, what: str) -> None:
        """It holds no state: one serves any number of inputs at once."""
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit):
            raise HeadraceError(Reason.INTERNAL_ERROR, self._what) from error


def valid_unicode(text: str) -> bytes:
    """`text` in UTF-8. Raises HeadraceError (invalid_request) for unpaired surrogates, which no tokenizer can take."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise HeadraceError(Reason.INVALID_REQUEST, f"unpaired surrogate at character {error.start}") from error


def _byte_table(tokenizer: FastTokenizer, special: frozenset[int], decoder: Mapping[str, Any]) -> list[bytes]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    byte_of = _byte_level_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    for piece, token_id in vocab.items():
        if token_id in special:
            table[token_id] = added[token_id].content.encode()
        elif "ByteLevel" in decoder:
            table[token_id] = _byte_level_bytes(piece, byte_of)
        elif "WordPiece" in decoder:
            table[token_id] = _word_piece_bytes(piece, decoder["WordPiece"].get("prefix", "##"))
        else:
            table[token_id] = _sentencepiece_bytes(piece)
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (openai/gpt-2, `encoder.py`, `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + place): b for place, b in enumerate(moved)}


def _byte_level_bytes(piece: str, byte_of: Mapping[str, int]) -> bytes:
    """An added token may hold characters outside the alphabet; it then stands for itself, as in `tokenizers`."""
    if all(character in byte_of for character in piece):
        return bytes(byte_of[character] for character in piece)
    return piece.encode()


def _word_piece_bytes(piece: str, prefix: str) -> bytes:
    """A piece with the prefix goes on with a word; any other begins one. Where the decoder then takes spaces away is known of a whole text only."""
    return piece.removeprefix(prefix).encode() if piece.startswith(prefix) else f" {piece}".encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback is not None:
        return bytes((int(fallback[1], 16),))
    return piece.replace(_SPACE_MARK, " ").encode()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder of a `tokenizer.json` as a flat list of steps. Refuses what `token_bytes` couldn't reproduce."""
    if decoder is None:
        raise HeadraceError(Reason.INTERNAL_ERROR, "the tokenizer names no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known = {"ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Replace", "Strip", "WordPiece"}
    unknown = {step["type"] for step in steps} - known
    if unknown:
        names = ", ".join(sorted(unknown))
        raise HeadraceError(Reason.INTERNAL_ERROR, f"the tokenizer decodes by {names}, which isn't served")
    return list(steps)


def _strips_leading_space(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step["type"] == "WordPiece":
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadraceError(Reason.INTERNAL_ERROR, f"{path} isn't valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; each is a string or an added token's description."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _eos_token_ids(path: Path, tokenizer: FastTokenizer, eos: str | None) -> frozenset[int]:
    configured = _read_json(path / "generation_config.json").get("eos_token_id")
    if configured is None:
        configured = _read_json(path / "config.json").get("eos_token_id")
    listed = configured if isinstance(configured, list) else [configured]
    own = tokenizer.token_to_id(eos) if eos is not None else None
    return frozenset(i for i in [*listed, own] if isinstance(i, int))


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        return next((str(t["template"]) for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None
