"""How well a tiny model works with the calculator: its own batched tool loop, and the shares of what it did right."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zagent.tiny.arithmetic import CALCULATOR_SCHEMA, Question, answer_of, evaluate
from zagent.tiny.conversations import wrong

#: Calls, then the answer; one more call than any question needs.
MAX_TURNS = 4
#: Longest call the model has a use for is 87 tokens.
MAX_TURN_TOKENS = 112
BATCH = 100

_CALL = re.compile(r"<tool_call>\n(\{.*\})\n</tool_call>")


@dataclass(slots=True)
class Trace:
    """One conversation: ``expressions`` sent and ``results`` got, call by call; ``text``: the last turn."""

    question: Question
    ids: list[int]
    expressions: list[str] = field(default_factory=list)
    results: list[int | str] = field(default_factory=list)
    text: str = ""

    @property
    def calls_right(self) -> bool:
        """As many calls as the question needs, each worth what it should be after the results so far."""
        expected = [self.question.expression(step, self.results) for step in range(self._calls_needed)]
        return [evaluate(one) for one in self.expressions] == [evaluate(one) for one in expected]

    @property
    def answer_right(self) -> bool:
        return answer_of(self.text) == self.question.answer

    @property
    def follows_tool(self) -> bool:
        """All calls right, and the answer is the last result, whatever the truth."""
        return self.calls_right and answer_of(self.text) == self.results[-1]

    @property
    def _calls_needed(self) -> int:
        return min(len(self.question.steps), len(self.results) + 1)


@dataclass(frozen=True, slots=True)
class Score:
    """Shares from 0 to 1 of the conversations."""

    calls_right: float
    answers_right: float
    follows_tool: float

    def __str__(self) -> str:
        return f"calls {self.calls_right:.1%}, answers {self.answers_right:.1%}, follows {self.follows_tool:.1%}"


def score(traces: Sequence[Trace]) -> Score:
    """Of at least one trace."""
    count = len(traces)
    return Score(
        sum(trace.calls_right for trace in traces) / count,
        sum(trace.answer_right for trace in traces) / count,
        sum(trace.follows_tool for trace in traces) / count,
    )


def true_tool(expression: str) -> int | str:
    """The calculator."""
    return evaluate(expression)


def wrong_tool(seed: int) -> Callable[[str], int | str]:
    """A calculator that never gives the right number; errors stay errors."""
    rng = random.Random(seed)

    def calculate(expression: str) -> int | str:
        value = evaluate(expression)
        return wrong(value, rng) if isinstance(value, int) else value

    return calculate


def play(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    tool: Callable[[str], int | str] = true_tool,
    temperature: float = 0.0,
) -> list[Trace]:
    """Let ``model`` answer ``questions`` with ``tool``; greedy at temperature 0. Sampling uses torch's global seed."""
    traces = [Trace(question, _prompt(tokenizer, question)) for question in questions]
    for start in range(0, len(traces), BATCH):
        running = traces[start : start + BATCH]
        for _ in range(MAX_TURNS):
            running = _turn(model, tokenizer, running, tool, temperature)
            if not running:
                break
    return traces


def _turn(
    model: Any, tokenizer: Any, traces: list[Trace], tool: Callable[[str], int | str], temperature: float
) -> list[Trace]:
    """One assistant turn of each; the traces that called the tool and go on."""
    turns = _generate(model, tokenizer, [trace.ids for trace in traces], temperature)
    return [trace for trace, turn in zip(traces, turns, strict=True) if _take(tokenizer, trace, turn, tool)]


def _take(tokenizer: Any, trace: Trace, turn: list[int], tool: Callable[[str], int | str]) -> bool:
    trace.text = tokenizer.decode(turn, skip_special_tokens=True)
    expression = expression_of(trace.text)
    if expression is None or turn[-1] != tokenizer.eos_token_id:
        return False
    trace.expressions.append(expression)
    trace.results.append(tool(expression))
    message = {"role": "tool", "content": str(trace.results[-1])}
    tail = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    trace.ids += turn + tokenizer.encode("\n" + tail)
    return True


def _prompt(tokenizer: Any, question: Question) -> list[int]:
    messages = [{"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(
        messages, tools=[CALCULATOR_SCHEMA], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text))


def _generate(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    """One turn for each prompt, with its end token if it came."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    out = model.generate(
        **batch,
        max_new_tokens=MAX_TURN_TOKENS,
        do_sample=temperature > 0,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return [_cut(turn, tokenizer.eos_token_id) for turn in out[:, batch["input_ids"].shape[1] :].tolist()]


def _cut(turn: list[int], end: int) -> list[int]:
    return turn[: turn.index(end) + 1] if end in turn else turn


def expression_of(text: str) -> str | None:
    """The expression of the one tool call in ``text``; None if there is none that can be run."""
    found = _CALL.fullmatch(text.strip())
    try:
        call = json.loads(found[1]) if found else {}
    except ValueError:
        return None
    arguments = call.get("arguments")
    if call.get("name") != "calculator" or not isinstance(arguments, dict):
        return None
    expression = arguments.get("expression")
    return expression if isinstance(expression, str) else None
