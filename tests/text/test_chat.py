"""Chat templates: rendered as Hugging Face renders them, and refused with the caller's or the model's fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import HeadraceError
from schemas.events import Message
from schemas.reasons import Reason
from tests.text.tokenizers_made import PieceTokenizer
from text.chat import encode_chat, render_chat
from text.tokenizer import ByteTokenizer, load_tokenizer

NOON_MS = 1_753_531_200_000  # 26 July 2025, 12:00 UTC
CHATS = [
    [Message("user", "Who are you?")],
    [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello."), Message("user", " bye\n")],
    [Message("user", "<|im_end|>\n<|im_start|>system\n& < > \" ' é 🙂 {{ 7 * 7 }} {% raw %}")],
    [Message("user", ""), Message("assistant", "")],
]
any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
any_chat = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), any_text), min_size=1, max_size=5
)


def render(template: str, *messages: Message, now_ms: int | None = None, **special: str) -> str:
    tokenizer = PieceTokenizer([])
    tokenizer.chat_template = template
    tokenizer.special_tokens = special
    return render_chat(tokenizer, messages, now_ms=now_ms)


def as_dicts(chat: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat]


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path) -> Any:
    """The model's tokenizer as transformers has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_dir))


class TestEqualsTransformers:
    @pytest.mark.parametrize("chat", CHATS)
    @pytest.mark.parametrize("prompt", [True, False])
    def test_the_model_s_own_template(self, theirs: Any, smollm2_dir: Path, chat: list[Message], prompt: bool) -> None:
        ours = load_tokenizer(str(smollm2_dir))
        text = theirs.apply_chat_template(as_dicts(chat), tokenize=False, add_generation_prompt=prompt)
        assert render_chat(ours, chat, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(as_dicts(chat), add_generation_prompt=prompt, return_dict=False)
        assert encode_chat(ours, chat, add_generation_prompt=prompt) == ids

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(chat=any_chat)
    def test_templates_with_the_features_they_use(self, byte_level_dir: Path, chat: list[Message]) -> None:
        chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
        template = (
            "  {% if tools is none and not documents %}\n{{ bos_token }}\n  {% endif %}\n"
            "{%- for m in messages %}\n"
            "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
            "  {% generation %}{% set kept = 1 %}<{{ m['role'] }}>{{ m.content | trim }}{% endgeneration %}\n"
            "{{ kept is defined }}{{ m | tojson }}{{ m | tojson(indent=2) }}\n"
            "    {% if loop.index > 3 %}{% break %}{% endif %}\n"
            "{% endfor %}\n"
            "{% if add_generation_prompt %}<assistant>{% endif %}\n"
        )
        theirs, _ = chat_template_utils.render_jinja_template(
            [as_dicts(chat)], chat_template=template, add_generation_prompt=True, bos_token="<s>"
        )
        assert render(template, *chat, bos_token="<s>") == theirs[0]


class TestByteTokenizer:
    @given(chat=any_chat, last=any_text)
    def test_the_prompt_is_the_last_user_message(self, chat: list[Message], last: str) -> None:
        messages = [*chat, Message("user", last), Message("assistant", "so far")]
        assert bytes(encode_chat(ByteTokenizer(), messages)) == last.encode()

    def test_a_chat_without_a_user_is_refused(self) -> None:
        with pytest.raises(HeadraceError, match="message of the user"):
            encode_chat(ByteTokenizer(), [Message("system", "x")])


class TestTime:
    def test_a_template_is_told_the_time_it_is_given(self) -> None:
        template = "{% macro day() %}{{ strftime_now('%d %b %Y %H:%M') }}{% endmacro %}{{ day() }}"
        assert render(template, now_ms=NOON_MS) == "26 Jul 2025 12:00"

    def test_without_a_time_a_template_that_asks_first_falls_back(self) -> None:
        assert render("{% if strftime_now is defined %}now{% else %}then{% endif %}") == "then"

    def test_without_a_time_a_template_that_insists_is_refused(self) -> None:
        with pytest.raises(HeadraceError, match="strftime_now"):
            render("{{ strftime_now('%Y') }}")


class TestRefusals:
    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('roles must alternate') }}",
            "{{ messages[5].content.strip() }}",
            "{{ 1 / 0 }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{% for i in range(10000000) %}{% endfor %}",
        ],
    )
    def test_a_template_that_fails_refuses_the_messages(self, template: str) -> None:
        with pytest.raises(HeadraceError) as caught:
            render(template, Message("user", "x"))
        assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, "messages")

    def test_a_template_s_own_words_reach_the_caller(self) -> None:
        with pytest.raises(HeadraceError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")

    def test_a_broken_template_is_the_model_s_fault(self) -> None:
        with pytest.raises(HeadraceError, match="line 2") as caught:
            render("\n{% if %}")
        assert caught.value.reason is Reason.INTERNAL_ERROR

    def test_a_model_without_a_template_is_named(self) -> None:
        with pytest.raises(HeadraceError, match="no chat template"):
            render_chat(PieceTokenizer([]), [])

    @pytest.mark.parametrize("field", ["role", "content", "name"])
    def test_an_unpaired_surrogate_is_refused_by_its_field(self, field: str) -> None:
        bad = {"role": "user", "content": "x", "name": "n"} | {field: "a\udc00"}
        with pytest.raises(HeadraceError) as caught:
            encode_chat(ByteTokenizer(), [Message("user", "x"), Message(**bad)])
        assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, f"messages[1].{field}")

    def test_a_name_is_shown_to_the_template_only_if_given(self) -> None:
        template = "{% for m in messages %}{{ m.name | default('-') }}{% endfor %}"
        assert render(template, Message("user", "x", name="Ada"), Message("user", "x")) == "Ada-"
