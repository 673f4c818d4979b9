"""One token a byte, and a template that appends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zagent.loops.tokenizer import load_tokenizer, probe
from zagent.models import PACKAGED
from zagent.tiny.arithmetic import CALCULATOR_SCHEMA, dialogue, questions
from zagent.tiny.tokenizer import MARKS, SPECIAL, build

TOKENIZER = build()
SYSTEM = {"role": "system", "content": "Be brief."}


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, **options))


@given(st.text())
def test_a_token_is_a_byte(text: str) -> None:
    """Text without special tokens and marks becomes its UTF-8 bytes and comes back."""
    assume(not any(token in text for token in (*SPECIAL, *MARKS)))
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("token", [*SPECIAL, *MARKS])
def test_special_tokens_and_marks_are_one_token(token: str) -> None:
    """Only the special ones are skipped in decoding, so that a parser sees the marks."""
    ids = TOKENIZER.encode(f"a{token}b")
    assert len(ids) == 3
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == ("ab" if token in SPECIAL else f"a{token}b")


@given(st.integers(), st.booleans(), st.booleans(), st.lists(st.integers(), min_size=2, max_size=2))
def test_the_template_appends(seed: int, system: bool, tools: bool, results: list[int | str]) -> None:
    """What is rendered of the first messages begins what is rendered of more; before an assistant turn the generation
    prompt does, too."""
    messages = [SYSTEM] if system else []
    for question in questions(seed, 3):
        messages += dialogue(question, results[: len(question.steps)])
    listed = [CALCULATOR_SCHEMA] if tools else None
    before = ""
    for count, message in enumerate(messages, 1):
        whole = render(messages[:count], listed)
        assert whole.startswith(before)
        if message["role"] == "assistant":
            assert whole.startswith(render(messages[: count - 1], listed, add_generation_prompt=True))
        before = whole


def test_a_dialogue_looks_like_this() -> None:
    """Hermes' form: tools in the system message, calls and results between marks."""
    [question] = questions(0, 1)
    assert len(question.steps) == 1
    function = json.dumps(CALCULATOR_SCHEMA["function"])
    call = json.dumps({"name": "calculator", "arguments": {"expression": question.steps[0]}})
    assert render([SYSTEM, *dialogue(question, [-8])], [CALCULATOR_SCHEMA]) == (
        f"<|im_start|>system\nBe brief.\n<tools>\n{function}\n</tools><|im_end|>\n"
        f"<|im_start|>user\n{question.text}<|im_end|>\n"
        f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n-8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThe answer is -8.<|im_end|>\n"
    )


def test_arguments_may_be_an_object() -> None:
    """And content may stand before several calls, or be null."""
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    one = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    said = [{"role": "assistant", "content": text, "tool_calls": [call, call]} for text in ("Well.", None)]
    assert render(said) == (
        f"<|im_start|>assistant\nWell.\n{one}\n{one}<|im_end|>\n<|im_start|>assistant\n{one}\n{one}<|im_end|>\n"
    )


def test_a_role_that_is_unknown_is_an_error() -> None:
    """It is not left out."""
    with pytest.raises(Exception, match="unknown role: critic"):
        render([{"role": "critic", "content": "No."}])


@pytest.mark.parametrize("directory", PACKAGED.values(), ids=str)
def test_the_saved_tokenizer_is_this_one(directory: Path) -> None:
    """Loaded light or by AutoTokenizer, it encodes, stops and renders as the one that was built."""
    assert probe(load_tokenizer(str(directory))) == probe(load_tokenizer(str(directory), auto=True)) == probe(TOKENIZER)
