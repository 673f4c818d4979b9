"""Integer arithmetic that takes one or two calls of a calculator: questions, the tool, and the ideal dialogue."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Largest operand of a question, and the size that no result of one reaches.
OPERAND_LIMIT = 999
RESULT_LIMIT = 10**7

#: Share of the questions that take two calls.
TWO_STEP_SHARE = 0.4

CALCULATOR_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Integer arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}

#: Longest expression the calculator reads, in characters.
EXPRESSION_LIMIT = 200

ONE_STEP = {
    "+": (
        "What is {a} + {b}?",
        "Compute {a} plus {b}.",
        "What is the sum of {a} and {b}?",
        "Add {b} to {a}.",
        "How much is {a} plus {b}?",
        "{a} + {b} = ?",
    ),
    "-": (
        "What is {a} - {b}?",
        "Compute {a} minus {b}.",
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
        "How much is {a} minus {b}?",
        "{a} - {b} = ?",
    ),
    "*": (
        "What is {a} * {b}?",
        "Compute {a} times {b}.",
        "What is the product of {a} and {b}?",
        "Multiply {a} by {b}.",
        "How much is {a} times {b}?",
        "{a} * {b} = ?",
    ),
}

#: How a two-step question begins and goes on; ``{c}`` is the second operand.
FIRST = {"+": ("{a} plus {b}", "{a} + {b}"), "-": ("{a} minus {b}", "{a} - {b}"), "*": ("{a} times {b}", "{a} * {b}")}
BEGINNINGS = ("Take {first}", "Compute {first}", "Work out {first}")
SECOND = {
    "+": (" and add {c} to the result.", ", then add {c}.", " and add {c}."),
    "-": (" and subtract {c} from the result.", ", then subtract {c}.", " and take away {c}."),
    "*": (" and multiply the result by {c}.", ", then multiply by {c}.", " and multiply that by {c}."),
}


@dataclass(frozen=True, slots=True)
class Question:
    """``steps``: one expression per call; ``{}`` in the second stands for the first one's result."""

    text: str
    steps: tuple[str, ...]
    answer: int

    def expression(self, step: int, results: Sequence[int | str]) -> str:
        """What to send to the calculator in call ``step`` (from 0), after ``results``."""
        return self.steps[step].format(*results[step - 1 : step])


def questions(seed: int, count: int) -> list[Question]:
    """``count`` questions; the same for the same ``seed``, and the first ones of any larger ``count``."""
    rng = random.Random(seed)
    return [_question(rng) for _ in range(count)]


def _question(rng: random.Random) -> Question:
    return _two_steps(rng) if rng.random() < TWO_STEP_SHARE else _one_step(rng)


def _one_step(rng: random.Random) -> Question:
    sign, a, b = _operation(rng)
    text = rng.choice(ONE_STEP[sign]).format(a=a, b=b)
    return Question(text, (f"{a} {sign} {b}",), OPERATIONS[sign](a, b))


def _two_steps(rng: random.Random) -> Question:
    while True:
        (sign, a, b), (then, _, c) = _operation(rng), _operation(rng)
        answer = OPERATIONS[then](OPERATIONS[sign](a, b), c)
        if abs(answer) < RESULT_LIMIT:
            break
    text = rng.choice(BEGINNINGS).format(first=rng.choice(FIRST[sign])) + rng.choice(SECOND[then])
    return Question(text.format(a=a, b=b, c=c), (f"{a} {sign} {b}", f"{{}} {then} {c}"), answer)


def _operation(rng: random.Random) -> tuple[str, int, int]:
    return rng.choice(tuple(OPERATIONS)), _operand(rng), _operand(rng)


def _operand(rng: random.Random) -> int:
    """One, two and three digits equally often."""
    return rng.randint(0, rng.choice((9, 99, OPERAND_LIMIT)))


def evaluate(expression: str) -> int | str:
    """The value of ``expression`` (integers, ``+ - *``, signs, parentheses), or a sentence that says why there is
    none: what a tool tells a model."""
    if len(expression) > EXPRESSION_LIMIT:
        return f"error: the expression is longer than {EXPRESSION_LIMIT} characters"
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression of integers with + - * and parentheses"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _NODES:
            return OPERATIONS[_NODES[type(sign)]](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
    raise ValueError(f"no arithmetic: {type(node).__name__}")


def dialogue(question: Question, results: Sequence[int | str]) -> list[dict[str, Any]]:
    """Chat messages of a perfect conversation in which the calculator said ``results``, one per step, right or wrong:
    later calls and the answer are built from them, not from the truth."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for step, result in enumerate(results):
        messages.append(_call(question.expression(step, results)))
        messages.append({"role": "tool", "name": "calculator", "content": str(result)})
    return [*messages, {"role": "assistant", "content": f"The answer is {results[-1]}."}]


def _call(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def answer_of(text: str) -> int | None:
    """The integer ``text`` ends with, a full stop aside; None if it ends with none."""
    found = re.search(r"(?<![\w.-])(-?\d+)\.?\s*$", text)
    return int(found[1]) if found else None
