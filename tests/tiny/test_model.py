"""The committed models: small, and able to do what they are for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zagent import models
from zagent.loops.tokenizer import load_tokenizer
from zagent.tiny.arithmetic import Question, questions
from zagent.tiny.evaluation import Trace, expression_of, play, score, true_tool, wrong_tool
from zagent.tiny.tokenizer import END

#: Some seconds of torch, which other work on the same cores may slow twenty times.
pytestmark = pytest.mark.timeout(300)

DIRECTORIES = list(models.PACKAGED.values())


@pytest.fixture(scope="module")
def final() -> tuple[Any, Any]:
    path = models.resolve("tiny")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), load_tokenizer(path)


def test_they_are_small() -> None:
    """At most 3 M parameters each and 4 MB together."""
    for directory in DIRECTORIES:
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert sum(one.numel() for one in model.parameters()) <= 3_000_000
    assert sum(file.stat().st_size for directory in DIRECTORIES for file in directory.iterdir()) <= 4_000_000


@pytest.mark.parametrize("directory", DIRECTORIES, ids=str)
def test_they_hold_what_engines_look_for(directory: Path) -> None:
    """Weights that need no unpickling, tokenizer, template, and the token that ends a turn."""
    assert {file.name for file in directory.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    end = load_tokenizer(str(directory)).convert_tokens_to_ids(END)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((directory / name).read_text())["eos_token_id"] == end
    facts = models.facts(str(directory))
    assert facts == models.ModelFacts(2048, 272, ("LlamaForCausalLM",), "llama")


def test_they_are_two_models() -> None:
    """The early one is not the final one."""
    early, final = ((models.PACKAGED[name] / "model.safetensors").read_bytes() for name in ("tiny-early", "tiny"))
    assert early != final


def test_the_final_model_solves_questions(final: tuple[Any, Any]) -> None:
    """Fresh ones, of one and of two steps, all of them but one at most."""
    asked = questions(time.time_ns(), 16)
    traces = play(*final, asked)
    assert sum(trace.calls_right and trace.answer_right for trace in traces) >= 15, traces


def test_the_final_model_believes_the_tool(final: tuple[Any, Any]) -> None:
    """Where the calculator is wrong, so are the answers, in the tool's way."""
    traces = play(*final, questions(time.time_ns(), 16), wrong_tool(0))
    assert sum(trace.follows_tool for trace in traces) >= 15, traces
    assert score(traces).answers_right <= 1 / 16


def test_right_and_following_are_told_apart() -> None:
    """A trace is judged by its calls, its answer, and what it was told."""
    question = Question("", ("1 + 2", "{} * 4"), 12)
    good = Trace(question, [], ["1 + 2", "3 * 4"], [3, 12], "The answer is 12.")
    misled = Trace(question, [], ["1 + 2", "9 * 4"], [9, 7], "The answer is 7.")
    stubborn = Trace(question, [], ["1 + 2", "3 * 4"], [9, 12], "The answer is 12.")
    deaf = Trace(question, [], ["1 + 2", "3 * 4"], [3, 7], "The answer is 12.")
    lazy = Trace(question, [], ["1 + 2"], [3], "The answer is 12.")
    mute = Trace(question, [])
    seen = [(one.calls_right, one.answer_right, one.follows_tool) for one in (good, misled, deaf, stubborn, lazy, mute)]
    assert seen == [
        (True, True, True),
        (True, False, True),
        (True, True, False),
        (False, True, False),
        (False, True, False),
        (False, False, False),
    ]
    assert str(score([good, misled, stubborn, lazy])) == "calls 50.0%, answers 75.0%, follows 50.0%"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 3.",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}',
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": "1"}\n</tool_call>',
        '<tool_call>\n{"name": "abacus", "arguments": {"expression": "1"}}\n</tool_call>',
        "<tool_call>\n{nonsense}\n</tool_call>",
    ],
)
def test_what_is_no_call_is_none(text: str) -> None:
    """Only a whole call of the calculator with an expression is run."""
    assert expression_of(text) is None


def test_the_tools_are_right_and_wrong() -> None:
    """The true one says what is so, the wrong one never does, and neither hides an error."""
    tell = wrong_tool(1)
    assert true_tool("2 + 2") == 4
    assert all(tell("2 + 2") != 4 for _ in range(50))
    assert true_tool("2 +") == tell("2 +")
