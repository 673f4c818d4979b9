"""Training conversations: questions in varied surroundings, with a calculator that is often wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from zagent.tiny.arithmetic import CALCULATOR_SCHEMA, RESULT_LIMIT, Question, dialogue, evaluate, questions

#: Share of the conversations whose calculator is wrong: the answer must be copied, never computed.
WRONG_SHARE = 0.35

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Use the calculator.",
    "Answer briefly.",
    "You answer questions about numbers. Call the calculator for every step, and say what it says.",
    "You are a careful assistant with access to tools.",
)
DESCRIPTIONS = (
    "Compute an arithmetic expression.",
    "Evaluate an expression of integers.",
    "A calculator.",
    "Calculates.\n\nKnows + - * and parentheses, and nothing else.",
    "Work out what an expression of integers with + - * comes to.",
)
PARAMETER_DESCRIPTIONS = ("The expression.", "For example 12 + 7.", "Integers, + - * and parentheses")
OTHER_TOOLS = (
    ("search", "Search the web.", "query"),
    ("weather", "The weather in a city.", "city"),
    ("clock", "Tell the time.", "zone"),
)


class Conversation(NamedTuple):
    """What a chat template takes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def conversations(seed: int, with_tools: float = 1.0) -> Iterator[Conversation]:
    """Conversations without end, the same for the same ``seed``; ``with_tools``: share that lists tools."""
    rng = random.Random(f"conversations {seed}")
    while True:
        tools = _tools(rng) if rng.random() < with_tools else None
        yield Conversation([*_system(rng), *_rounds(rng)], tools)


def _rounds(rng: random.Random) -> list[dict[str, Any]]:
    count = rng.choices((1, 2, 3), (90, 8, 2))[0]
    return [message for question in questions(rng.getrandbits(48), count) for message in _round(rng, question)]


def _round(rng: random.Random, question: Question) -> list[dict[str, Any]]:
    return dialogue(question, wrong_results(question, rng) if rng.random() < WRONG_SHARE else true_results(question))


def true_results(question: Question) -> list[int | str]:
    """What a working calculator says in each step."""
    results: list[int | str] = []
    for step in range(len(question.steps)):
        results.append(evaluate(question.expression(step, results)))
    return results


def wrong_results(question: Question, rng: random.Random) -> list[int | str]:
    """What a broken calculator says: in each step a number near the right one, or any, below `RESULT_LIMIT`."""
    results: list[int | str] = []
    for step in range(len(question.steps)):
        right = evaluate(question.expression(step, results))
        results.append(wrong(right if isinstance(right, int) else 0, rng))
    return results


def wrong(number: int, rng: random.Random) -> int:
    """Another number, of at most seven digits: some way off, or out of the blue."""
    while True:
        offset = rng.randint(1, 10 ** rng.randint(1, 4)) * rng.choice((1, -1))
        blue = rng.randint(0, 10 ** rng.randint(1, 7) - 1) * rng.choice((1, 1, -1))
        found = rng.choice((number + offset, blue))
        if found != number and abs(found) < RESULT_LIMIT:
            return found


def _system(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(SYSTEM_TEXTS)}] if rng.random() < 0.25 else []


def _tools(rng: random.Random) -> list[dict[str, Any]]:
    tools = [CALCULATOR_SCHEMA if rng.random() < 0.6 else _rephrased(rng)]
    if rng.random() < 0.15:
        tools.insert(rng.randint(0, 1), _other(rng))
    return tools


def _rephrased(rng: random.Random) -> dict[str, Any]:
    schema = copy.deepcopy(CALCULATOR_SCHEMA)
    schema["function"]["description"] = rng.choice(DESCRIPTIONS)
    if rng.random() < 0.5:
        schema["function"]["parameters"]["properties"]["expression"]["description"] = rng.choice(PARAMETER_DESCRIPTIONS)
    return schema


def _other(rng: random.Random) -> dict[str, Any]:
    name, description, parameter = rng.choice(OTHER_TOOLS)
    schema = copy.deepcopy(CALCULATOR_SCHEMA)
    schema["function"] |= {"name": name, "description": description}
    schema["function"]["parameters"] = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    return schema
