"""Control calls to members by name, some of which die meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.errors import DeadlineExceeded, EncodeError, MemberLost, PoolLost
from zagent.trainer.control import Control
from zagent.wire.messages import BROKER


class FakeCalls:
    """Answers `status` with the rounds of ``statuses`` (the last one for ever), and members' calls by ``answers``."""

    def __init__(self, statuses: list[dict[str, str]], answers: dict[str, Any]) -> None:
        self.statuses, self.answers = statuses, answers
        self.asked: list[tuple[str, str]] = []

    async def call(self, pool: str, method: str, argument: Any = None, *, member: str = "", timeout: float) -> Any:
        if pool == BROKER:
            states = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            members = {name: {"state": state, "epoch": 1} for name, state in states.items()}
            return {"pools": {"worker": members}, "recovering": not states}
        self.asked.append((member, method))
        answer = self.answers[member]
        if isinstance(answer, Exception):
            raise answer
        return answer


def control(statuses: list[dict[str, str]], **answers: Any) -> tuple[Control, FakeCalls]:
    calls = FakeCalls(statuses, answers)
    return Control(calls), calls  # type: ignore[arg-type]


def test_every_live_member_is_asked() -> None:
    """By name; the dead are left out."""
    asking, calls = control([{"a": "ready", "b": "dead", "c": "draining"}], a=1, c=3)
    assert run(asking.on_members("worker", "stats")) == {"a": 1, "c": 3}
    assert calls.asked == [("a", "stats"), ("c", "stats")]


def test_a_pool_without_live_members_is_an_error() -> None:
    """Which names the pool."""
    asking, _ = control([{"a": "dead"}])
    with pytest.raises(MemberLost, match="worker"):
        run(asking.on_members("worker", "stats"))


def test_a_new_broker_is_asked_until_its_members_are_back() -> None:
    """Before that it knows of none, nor of what they run."""
    asking, _ = control([{}, {}, {"a": "ready"}], a=1)
    assert run(asking.on_members("worker", "stats")) == {"a": 1}


def test_exceptions_may_be_wanted() -> None:
    """In the place of results, those of members that are gone as well; nobody there is no result."""
    asking, _ = control([{"a": "ready", "b": "ready"}], a=ValueError("no"), b=MemberLost("gone"))
    results = run(asking.try_members("worker", "stats"))
    assert {name: type(result) for name, result in results.items()} == {"a": ValueError, "b": MemberLost}
    empty, _ = control([{"a": "dead"}])
    assert run(empty.try_members("worker", "stats")) == {}


@pytest.mark.parametrize("argument", [2**70, "\udcff", object()])
def test_what_cannot_be_sent_is_no_members_failure(argument: Any) -> None:
    """It is raised, and nobody has been asked."""
    asking, calls = control([{"a": "ready", "b": "ready"}], a=1, b=2)
    with pytest.raises(EncodeError):
        run(asking.try_members("worker", "stats", [argument]))
    assert calls.asked == []


def test_what_one_member_raises_is_raised() -> None:
    """After all have answered."""
    asking, calls = control([{"a": "ready", "b": "ready"}], a=ValueError("no"), b=2)
    with pytest.raises(ValueError, match="no"):
        run(asking.on_members("worker", "stats"))
    assert len(calls.asked) == 2


@pytest.mark.parametrize("before", [[], [{"a": "dead"}] * 3])
def test_members_that_come_are_waited_for(before: list[dict[str, str]]) -> None:
    """Where nobody is there."""
    asking, _ = control([*before, {"a": "ready", "b": "dead"}], **{"": MemberLost("gone")})
    assert run(asking.there("worker", 10)) == {"a": 1}


def test_members_that_do_not_come_in_time_are_not_there() -> None:
    """The time is the caller's."""

    async def wait() -> float:
        asking, _ = control([{"a": "dead"}], **{"": MemberLost("gone")})
        assert await asking.there("worker", 10) == {}
        return asyncio.get_running_loop().time()

    assert run(wait()) == pytest.approx(10)


def test_nobody_waits_for_an_abandoned_pool() -> None:
    """Its last words are raised."""
    asking, _ = control([{"a": "dead"}], **{"": PoolLost("no worker is left: cheese")})
    with pytest.raises(PoolLost, match="cheese"):
        run(asking.there("worker", 10))


def test_the_padding_id_is_asked_once() -> None:
    """Of one worker."""
    asking, calls = control([{"a": "ready", "b": "ready"}], a={"pad_token_id": 7}, b={"pad_token_id": 7})

    async def twice() -> list[int]:
        return [await asking.pad_token_id(), await asking.pad_token_id()]

    assert run(twice()) == [7, 7]
    assert calls.asked == [("a", "about")]


def test_a_worker_that_dies_meanwhile_is_passed_over() -> None:
    """The next one knows the padding id as well."""
    asking, _ = control([{"a": "ready", "b": "ready"}], a=MemberLost("gone"), b={"pad_token_id": 0})
    assert run(asking.pad_token_id()) == 0


def test_workers_that_are_started_again_are_waited_for() -> None:
    """All dead at first."""
    asking, _ = control([{"a": "dead"}, {"a": "dead"}, {"a": "ready"}], a={"pad_token_id": 5})
    assert run(asking.pad_token_id()) == 5


def test_nobody_waits_for_ever_for_the_padding_id() -> None:
    """The error says what was waited for."""

    async def ask() -> float:
        asking, _ = control([{"a": "dead"}])
        with pytest.raises(DeadlineExceeded, match="no worker said within 30 s"):
            await asking.pad_token_id()
        return asyncio.get_running_loop().time()

    assert run(ask()) == pytest.approx(30.0)
