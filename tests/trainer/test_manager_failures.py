"""When a batch with failed rows is an error."""

from __future__ import annotations

import dataclasses

import pytest

from support.outcomes import failed, ok
from zagent.errors import CallCancelled, RolloutError
from zagent.trainer.manager import check_failures
from zagent.types import Outcome


def batch(*bad: int, size: int = 10) -> list[Outcome]:
    return [failed(i) if i in bad else ok(i) for i in range(size)]


@pytest.mark.parametrize(("bad", "allowed"), [((), 0.0), ((3,), 0.1), ((3, 4), 0.25), (range(10), 1.0)])
def test_as_many_failures_as_allowed_pass(bad: list[int], allowed: float) -> None:
    """Also exactly the share."""
    check_failures(batch(*bad), allowed)


def test_an_empty_batch_passes() -> None:
    """Nothing failed."""
    check_failures([], 0.0)


def test_one_more_is_an_error_that_has_every_outcome() -> None:
    """In input order, the finished ones included: nothing is lost."""
    outcomes = batch(3, 4)
    with pytest.raises(RolloutError, match="2 of 10 rows failed") as caught:
        check_failures(outcomes, 0.1)
    assert caught.value.finished == outcomes
    assert caught.value.__cause__ is outcomes[3].error


def test_the_first_failures_are_named() -> None:
    """Row, uid and text of three, and how many more there are."""
    with pytest.raises(RolloutError) as caught:
        check_failures(batch(1, 2, 5, 7, 8), 0.0)
    text = str(caught.value)
    assert "row 1 (uid u1): it broke; row 2 (uid u2): it broke; row 5 (uid u5): it broke and 2 more" in text
    assert "u7" not in text


def test_a_foreign_error_is_named_with_its_class() -> None:
    """Its text alone may say nothing."""
    outcomes = [dataclasses.replace(failed(0), error=KeyError("k"))]
    with pytest.raises(RolloutError, match="KeyError: 'k'"):
        check_failures(outcomes, 0.0)


def test_cancelled_rows_count_as_failed_and_partial_ones_do_not() -> None:
    """A partial row has an output."""
    cancelled = dataclasses.replace(failed(0), status="cancelled", error=CallCancelled("x"))
    partial = dataclasses.replace(ok(1), status="partial")
    check_failures([partial], 0.0)
    with pytest.raises(RolloutError):
        check_failures([cancelled, partial], 0.0)
