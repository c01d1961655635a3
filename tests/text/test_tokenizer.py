"""Tokenizers: text to ids as `tokenizers` and transformers have it, and an id to its exact bytes."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.text.tokenizers_made import save_tokenizer
from text.detokenize import TextFold
from text.tokenizer import CACHED_TOKENIZERS, ByteTokenizer, HfTokenizer, load_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "   leading and trailing  ",
    "The capital of France is Paris.",
    "日本語 🙂👍🏽 é ё ﬁ",
    "tab\tline\r\n\n\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<tool call>b",
]
fixture_is_read_only = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def decoded(tokenizer: HfTokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    """`ids` through the text fold, which nothing ends."""
    fold = TextFold(tokenizer, max_tokens=len(ids) + 1, ignore_eos=True, skip_special_tokens=skip_special_tokens)
    state, text, _ = fold.fold_all(ids)
    return text + fold.tail(state)


@lru_cache
def reference(folder: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(folder / "tokenizer.json"))


class TestByteTokenizer:
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    def test_its_tokens_are_the_bytes_of_the_text(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()

    def test_its_end_is_special(self) -> None:
        tokenizer = ByteTokenizer()
        assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)] == [256]
        assert tokenizer.eos_token_ids == {256}
        assert (tokenizer.token_bytes(256), tokenizer.token_bytes(257), tokenizer.token_bytes(-1)) == (
            b"<eos>",
            b"",
            b"",
        )

    @pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
    def test_an_unpaired_surrogate_is_refused(self, text: str, byte_level_dir: Path) -> None:
        for tokenizer in (ByteTokenizer(), HfTokenizer.from_dir(byte_level_dir)):
            with pytest.raises(HeadraceError) as caught:
                tokenizer.encode(text, add_special_tokens=False)
            assert caught.value.reason is Reason.INVALID_REQUEST


class TestByteLevel:
    def test_it_reads_the_configuration(self, byte_level_dir: Path) -> None:
        tokenizer = HfTokenizer.from_dir(byte_level_dir)
        assert (tokenizer.bos, tokenizer.eos) == ("<|im_start|>", "<|im_end|>")
        assert tokenizer.eos_token_ids == {2}
        assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)] == [0, 1, 2]
        assert tokenizer.vocab_size == reference(byte_level_dir).get_vocab_size()
        assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
        assert not tokenizer.strips_leading_space

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_the_bytes_of_the_tokens_are_the_text(self, byte_level_dir: Path, text: str) -> None:
        tokenizer = HfTokenizer.from_dir(byte_level_dir)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text

    @pytest.mark.parametrize("skip", [True, False])
    @fixture_is_read_only
    @given(data=st.data())
    def test_any_ids_fold_to_what_decode_gives(self, byte_level_dir: Path, skip: bool, data: st.DataObject) -> None:
        tokenizer = load_tokenizer(str(byte_level_dir))
        assert isinstance(tokenizer, HfTokenizer)
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        expected = reference(byte_level_dir).decode(ids, skip_special_tokens=skip)
        assert decoded(tokenizer, ids, skip_special_tokens=skip) == expected


class TestSentencePiece:
    @fixture_is_read_only
    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    def test_text_folds_back_as_decode_gives_it(self, sentencepiece_dir: Path, text: str) -> None:
        tokenizer = load_tokenizer(str(sentencepiece_dir))
        assert isinstance(tokenizer, HfTokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = reference(sentencepiece_dir).decode(ids, skip_special_tokens=skip)
            assert decoded(tokenizer, ids, skip_special_tokens=skip) == expected

    def test_byte_tokens_and_marks_are_undone(self, sentencepiece_dir: Path) -> None:
        tokenizer = HfTokenizer.from_dir(sentencepiece_dir)
        vocab = reference(sentencepiece_dir).get_vocab()
        assert tokenizer.token_bytes(vocab["<0xF0>"]) == b"\xf0"
        assert tokenizer.token_bytes(vocab["▁th"]) == b" th"
        assert tokenizer.token_bytes(vocab["<s>"]) == b"<s>"
        assert tokenizer.strips_leading_space


class TestDirectories:
    def make(self, folder: Path, **config: object) -> Path:
        tokenizer = FastTokenizer(models.BPE({"a": 0, "b": 1, "<e>": 2, "<f>": 3}, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<e>", "<f>"])
        return save_tokenizer(folder, tokenizer, **config)

    def test_eos_ids_come_from_the_generation_config_and_the_tokenizer(self, tmp_path: Path) -> None:
        self.make(tmp_path, eos_token="<e>")
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
        assert HfTokenizer.from_dir(tmp_path).eos_token_ids == {1, 2}
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
        assert HfTokenizer.from_dir(tmp_path).eos_token_ids == {2, 3}

    def test_the_template_comes_from_its_own_file_first(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        self.make(tmp_path, chat_template=named)
        assert HfTokenizer.from_dir(tmp_path).chat_template == "D"
        (tmp_path / "chat_template.jinja").write_text("é")
        assert HfTokenizer.from_dir(tmp_path).chat_template == "é"

    def test_truncation_and_padding_of_the_file_are_not_applied(self, tmp_path: Path) -> None:
        tokenizer = FastTokenizer(models.BPE({"a": 0}, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)
        assert (
            HfTokenizer.from_dir(save_tokenizer(tmp_path, tokenizer)).encode("aaaa", add_special_tokens=True) == [0] * 4
        )

    def test_a_character_that_no_token_stands_for_is_the_callers_to_hear_of(self, tmp_path: Path) -> None:
        tokenizer = FastTokenizer(models.Unigram([("a", 0.0)], None))
        tokenizer.decoder = decoders.ByteLevel()
        ours = HfTokenizer.from_dir(save_tokenizer(tmp_path, tokenizer))
        assert ours.encode("a", add_special_tokens=True) == [0]
        with pytest.raises(HeadraceError, match="unknown token") as caught:
            ours.encode("ab", add_special_tokens=True)
        assert caught.value.reason is Reason.INVALID_REQUEST

    def test_an_unusable_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(HeadraceError, match="no usable"):
            HfTokenizer.from_dir(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(HeadraceError, match="no usable"):
            HfTokenizer.from_dir(tmp_path)
        self.make(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(HeadraceError, match="tokenizer_config"):
            HfTokenizer.from_dir(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("chat_template.jinja", b"\xff"),
            ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
            ("tokenizer_config.json", b'{"chat_template": ["x"]}'),
        ],
    )
    def test_whatever_its_files_hold_the_error_is_headraces_own(
        self, tmp_path: Path, name: str, content: bytes
    ) -> None:
        """Admission lets the model's requests fail by it, and goes on with other models."""
        self.make(tmp_path)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(HeadraceError, match="no usable") as caught:
            HfTokenizer.from_dir(tmp_path)
        assert caught.value.reason is Reason.INTERNAL_ERROR

    def test_a_decoder_that_is_not_served_is_named(self, tmp_path: Path) -> None:
        tokenizer = FastTokenizer(models.BPE({"a": 0}, []))
        with pytest.raises(HeadraceError, match="no decoder"):
            HfTokenizer.from_dir(save_tokenizer(tmp_path, tokenizer))
        tokenizer.decoder = decoders.CTC()
        with pytest.raises(HeadraceError, match="CTC"):
            HfTokenizer.from_dir(save_tokenizer(tmp_path, tokenizer))

    def test_loading_is_cached_within_a_bound(self, byte_level_dir: Path) -> None:
        assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
        assert load_tokenizer(str(byte_level_dir)) is load_tokenizer(str(byte_level_dir))
        assert load_tokenizer.cache_info().maxsize == CACHED_TOKENIZERS


class TestSmolLM2:
    def test_it_equals_transformers(self, smollm2_dir: Path) -> None:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(smollm2_dir))
        ours = HfTokenizer.from_dir(smollm2_dir)
        assert (ours.vocab_size, ours.eos) == (49_152, "<|im_end|>")
        assert ours.eos_token_ids == {2}
        for text in ODD_TEXTS:
            for special in (True, False):
                ids = ours.encode(text, add_special_tokens=special)
                assert ids == theirs.encode(text, add_special_tokens=special)
            assert decoded(ours, ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)

    @fixture_is_read_only
    @given(ids=st.lists(st.integers(0, 49_151), max_size=20))
    def test_any_ids_fold_to_what_decode_gives(self, smollm2_dir: Path, ids: list[int]) -> None:
        ours = load_tokenizer(str(smollm2_dir))
        assert isinstance(ours, HfTokenizer)
        expected = reference(smollm2_dir).decode(ids, skip_special_tokens=True)
        assert decoded(ours, ids, skip_special_tokens=True) == expected
