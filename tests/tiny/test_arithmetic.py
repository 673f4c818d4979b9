"""Questions, the calculator, and the ideal dialogue."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.tiny.arithmetic import (
    CALCULATOR_SCHEMA,
    OPERAND_LIMIT,
    RESULT_LIMIT,
    Question,
    answer_of,
    dialogue,
    evaluate,
    questions,
)

TWO_STEPS = Question("Take 12 plus 7 and multiply the result by 3.", ("12 + 7", "{} * 3"), 57)

integers = st.integers(-(10**6), 10**6)
trees = st.recursive(
    integers.map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda one: f"({one[0]}) {one[1]} ({one[2]})"),
    max_leaves=5,
)


@given(trees)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    """Signs, parentheses and precedence as usual."""
    assert evaluate(expression) == eval(expression)


def test_products_come_before_sums() -> None:
    """Without parentheses, too."""
    assert evaluate("2 + 3 * -4 - +1") == -11


@pytest.mark.parametrize(
    "expression",
    ["", "12 +", "two", "1 / 2", "2 ** 9", "1.5", "True", "f(1)", "__import__('os')", "(" * 150, "1\n2", "٣ +", "0x"],
)
def test_what_is_no_arithmetic_is_a_sentence(expression: str) -> None:
    """The calculator runs no code and raises nothing: the model is told."""
    assert str(evaluate(expression)).startswith("error: not an expression")


def test_a_long_expression_is_refused() -> None:
    """Its products could take for ever."""
    assert evaluate("1" * 201) == "error: the expression is longer than 200 characters"


@given(st.integers(), st.integers(1, 40))
def test_questions_come_from_their_seed(seed: int, count: int) -> None:
    """The same seed gives the same questions, however many are asked for."""
    assert questions(seed, count) == questions(seed, 40)[:count]


def test_other_seeds_give_other_questions() -> None:
    """Few are alike."""
    assert len({question.text for seed in range(20) for question in questions(seed, 20)}) > 380


@given(st.integers())
def test_the_steps_lead_to_the_answer(seed: int) -> None:
    """Each step's expression, the second with the first one's result, ends at the answer, of at most seven digits."""
    for question in questions(seed, 20):
        results: list[int | str] = []
        for step in range(len(question.steps)):
            results.append(evaluate(question.expression(step, results)))
        assert results[-1] == question.answer
        assert abs(question.answer) < RESULT_LIMIT


def test_questions_are_of_all_kinds() -> None:
    """Two of five take two steps, every operator comes first and second, operands have one to three digits."""
    asked = questions(3, 2000)
    two = [question for question in asked if len(question.steps) == 2]
    assert 0.36 < len(two) / len(asked) < 0.44
    assert {(first.split()[1], second.split()[1]) for first, second in (question.steps for question in two)} == {
        (a, b) for a in "+-*" for b in "+-*"
    }
    operands = [int(word) for question in asked for word in question.steps[0].split()[::2]]
    assert (min(operands), max(operands)) == (0, OPERAND_LIMIT)


@given(st.integers())
def test_a_question_says_all_its_numbers(seed: int) -> None:
    """The text has every operand of every step."""
    for question in questions(seed, 20):
        numbers = [word for step in question.steps for word in step.split() if word.isdigit()]
        assert all(number in question.text for number in numbers)


def test_a_dialogue_follows_the_tool() -> None:
    """The second call and the answer are made of what the tool said, right or wrong."""
    said = dialogue(TWO_STEPS, [20, -5])
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [json.loads(said[at]["tool_calls"][0]["function"]["arguments"])["expression"] for at in (1, 3)]
    assert calls == ["12 + 7", "20 * 3"]
    assert [said[at]["content"] for at in (0, 2, 4, 5)] == [TWO_STEPS.text, "20", "-5", "The answer is -5."]


def test_calls_fit_the_schema() -> None:
    """Name and parameter of the calls are those the model is told of."""
    function = dialogue(TWO_STEPS, [1, 2])[1]["tool_calls"][0]["function"]
    schema = CALCULATOR_SCHEMA["function"]
    assert function["name"] == schema["name"]
    assert list(json.loads(function["arguments"])) == schema["parameters"]["required"] == ["expression"]


@given(integers)
def test_the_answer_is_the_number_at_the_end(number: int) -> None:
    """With or without a full stop; numbers before it do not count."""
    for text in (f"The answer is {number}.", f"3 and 4: {number}", str(number), f"{number}. \n"):
        assert answer_of(text) == number


@pytest.mark.parametrize("text", ["", "The answer is.", "19 it is", "about 1.5", "x12", "5 -", "--5"])
def test_no_number_at_the_end_is_no_answer(text: str) -> None:
    """Neither a fraction nor a part of a word is an integer."""
    assert answer_of(text) is None
