"""What a member knows of its calls outlives the broker: what runs, and what has been answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.alone import Alone, forever
from support.virtual_clock import run
from zagent.client.kept import Answer, Kept
from zagent.errors import Refused
from zagent.wire.messages import Call, Drain, HelloWanted, Progress, Reply

RAN: list[bytes] = []


async def do(argument: Any, call: Call) -> str:
    RAN.append(call.call)
    if call.call == b"bad":
        raise ValueError("bad")
    return "done"


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


def test_an_answered_call_that_comes_again_is_answered_again_and_not_run() -> None:
    """Replies and failures alike: the broker died with them."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        for call in (b"1", b"bad", b"1", b"bad"):
            alone.call(call)
            await asyncio.sleep(1)
        assert RAN == [b"1", b"bad"]
        assert alone.answers() == [("Reply", b"1", 1, "done"), ("Failure", b"bad", 1, "ValueError")] * 2

    run(main())


def test_another_attempt_is_another_call() -> None:
    """It runs."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        alone.call()
        await asyncio.sleep(1)
        alone.call(attempt=2)
        await asyncio.sleep(1)
        assert RAN == [b"1", b"1"]

    run(main())


@pytest.mark.parametrize(("passed", "again"), [(0, []), (1, [b"1"]), (2, [b"1", b"2"]), (9, [b"1", b"2", b"3"])])
def test_an_answer_is_kept_until_the_broker_has_passed_it_on(passed: int, again: list[bytes]) -> None:
    """And with it all before. A pulse says nothing of answers, however often it comes: those of minutes may have waited
    for a process that stood still, while its answer did not leave it either."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        calls = [b"1", b"2", b"3"]
        for call in calls:
            alone.call(call)
        await asyncio.sleep(1)
        for _ in range(10):
            alone.pulse()
        alone.passed(passed)
        for call in calls:
            alone.call(call)
        await asyncio.sleep(1)
        assert calls + again == RAN
        assert len(alone.answers()) == 6

    run(main())


def test_an_answer_that_was_sent_again_is_kept_anew() -> None:
    """The broker that asked for it may die, too."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        for sent in range(4):
            alone.call()
            await asyncio.sleep(1)
            alone.passed(sent)
        assert RAN == [b"1"]
        assert [reply.number for reply in alone.of(Reply)] == [1, 2, 3, 4]

    run(main())


def test_a_hello_names_what_runs_and_what_is_kept() -> None:
    """Each with its session and method; not what named this member, which comes here anyway."""

    async def main() -> None:
        alone = await Alone({"do": do, "wait": forever}, {"version": 3}).open()
        alone.call(b"1", session="s")
        alone.call(b"2", "wait", attempt=4, session="t")
        alone.call(b"3", "wait", member="m")
        await asyncio.sleep(1)
        alone.send(HelloWanted())
        await asyncio.sleep(1)
        assert sorted(alone.held()) == [[b"1", 1, "s", "do", False], [b"2", 4, "t", "wait", True]]
        assert alone.said[-1][1]["version"] == 3
        assert alone.link.identity.facts == {"version": 3}
        await alone.member.leave("the test is over")

    run(main())


async def stubborn(argument: Any, call: Call) -> None:
    """Takes five seconds to stop."""
    try:
        await forever(argument, call)
    finally:
        await asyncio.sleep(5)


def test_a_hello_names_nothing_that_was_to_be_stopped() -> None:
    """Whether it still runs or has ended: another member may have it, and what this one says of it is no answer."""

    async def main() -> None:
        alone = await Alone({"do": do, "wait": forever, "stop": stubborn}).open()
        for call, method in ((b"1", "wait"), (b"2", "stop"), (b"3", "wait"), (b"4", "do")):
            alone.call(call, method)
        await asyncio.sleep(1)
        for call in (b"1", b"2", b"5"):
            alone.cancel(call)
        await asyncio.sleep(0.1)
        alone.call(b"5", "do")  # overtaken by its cancel
        for _ in range(2):  # while it ends, and after that
            await asyncio.sleep(3)
            alone.send(HelloWanted())
            await asyncio.sleep(1)
            assert sorted(alone.held()) == [[b"3", 1, "", "wait", True], [b"4", 1, "", "do", False]]
            alone.welcome(known=True)
        assert alone.answers()[1:] == [("Failure", call, 1, "TransientError") for call in (b"1", b"5", b"2")]
        await alone.member.leave("the test is over")

    run(main())


def test_the_first_hello_holds_nothing() -> None:
    """And says so."""

    async def main() -> None:
        alone = Alone({"do": do})
        opening = asyncio.create_task(alone.link.open())
        await asyncio.sleep(1)
        assert alone.held() == []
        alone.welcome()
        await opening

    run(main())


def test_a_cancel_brings_a_kept_answer_again() -> None:
    """The broker would wait for it for ever, if it was lost."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        alone.call()
        await asyncio.sleep(1)
        alone.cancel()
        await asyncio.sleep(1)
        alone.call()
        await asyncio.sleep(1)
        assert RAN == [b"1"]
        assert alone.answers() == [("Reply", b"1", 1, "done")] * 3

    run(main())


@pytest.mark.parametrize(
    ("facts", "repeatable"), [({}, True), ({"idempotent": ["do"]}, True), ({"idempotent": []}, False)]
)
def test_a_call_that_was_stopped_says_whether_it_may_be_sent_again(facts: dict[str, Any], repeatable: bool) -> None:
    """As with a lost member: it had begun."""

    async def main() -> None:
        alone = await Alone({"do": forever}, facts).open()
        alone.call()
        await asyncio.sleep(1)
        alone.cancel()
        await asyncio.sleep(1)
        body = alone.said[-1][1]
        assert (body["type"], body["fields"]["repeatable"]) == ("TransientError", repeatable)

    run(main())


def test_a_call_that_comes_again_while_it_is_stopped_is_answered_once() -> None:
    """When it has stopped."""

    async def main() -> None:
        async def slow(argument: Any, call: Call) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(10)

        alone = await Alone({"do": slow}).open()
        alone.call()
        await asyncio.sleep(1)
        alone.cancel()
        await asyncio.sleep(1)
        alone.call()
        await asyncio.sleep(50)
        assert alone.answers() == [("Failure", b"1", 1, "TransientError")]

    run(main())


def test_a_leaving_member_tells_the_next_broker_too() -> None:
    """It would be given calls otherwise. One that stays says nothing."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        for incarnation in (2, 3):
            alone.send(HelloWanted())
            alone.welcome(incarnation)
            await asyncio.sleep(1)
            if incarnation == 2:
                assert alone.of(Drain) == []
                alone.call()
                leaving = asyncio.create_task(alone.member.leave("bye", grace=100))
                await asyncio.sleep(1)
                assert alone.of(Drain) == [Drain()]
        assert alone.of(Drain) == [Drain()] * 2
        await leaving

    run(main())


def test_progress_is_sent_while_the_call_runs() -> None:
    """Before its answer, and not after."""

    async def main() -> None:
        async def count(argument: Any, call: Call) -> str:
            for number in range(3):
                alone.member.progress(call, number)
            late.append(call)
            return "done"

        late: list[Call] = []
        alone = await Alone({"do": count}).open()
        alone.call(attempt=2)
        await asyncio.sleep(1)
        alone.member.progress(late[0], "late")
        await asyncio.sleep(1)
        said = [(Progress(b"1", 2), number) for number in range(3)]
        assert alone.said == [*said, (Reply(b"1", 2, 1), "done")]

    run(main())


def test_progress_on_a_closed_link_is_dropped() -> None:
    """The method goes on until it is cancelled."""

    async def main() -> None:
        async def count(argument: Any, call: Call) -> None:
            alone.link.close()
            alone.member.progress(call, 1)
            went_on.append(1)

        went_on: list[int] = []
        alone = await Alone({"do": count}).open()
        alone.call()
        await asyncio.sleep(1)
        assert went_on == [1]

    run(main())


# ---- the store ------------------------------------------------------------------------------------------------------


def answer(number: int, size: int) -> Answer:
    return Answer(Call(b"%d" % number, 1, "p", "m"), Reply(b"%d" % number, 1, number), [bytes(size - 1), b"x"])


def numbers(kept: Kept) -> list[int]:
    return [int(answer.call.call) for answer in kept]


def test_beyond_the_limit_the_oldest_answers_are_dropped() -> None:
    """Sizes are of whole bodies."""
    kept = Kept(10)
    kept.put(answer(1, 4))
    kept.put(answer(2, 3))
    kept.put(answer(3, 3))
    assert numbers(kept) == [1, 2, 3]
    kept.put(answer(4, 1))
    assert numbers(kept) == [2, 3, 4]
    kept.put(answer(5, 7))
    assert numbers(kept) == [4, 5]


def test_an_answer_larger_than_the_limit_is_not_kept() -> None:
    """Nor is anything else then: it was the newest."""
    kept = Kept(10)
    kept.put(answer(1, 4))
    kept.put(answer(2, 11))
    assert numbers(kept) == []
    kept.put(answer(3, 10))
    assert numbers(kept) == [3]


def test_what_is_taken_or_forgotten_makes_room() -> None:
    """Its bytes no longer count."""
    kept = Kept(10)
    kept.put(answer(1, 10))
    taken = kept.take((b"1", 1))
    assert taken is not None
    assert kept.take((b"1", 1)) is None
    kept.put(answer(2, 10))
    assert numbers(kept) == [2]
    kept.passed(2)
    assert numbers(kept) == []
    kept.put(answer(3, 5))
    kept.put(answer(4, 5))
    kept.passed(3)
    kept.put(answer(5, 5))
    assert numbers(kept) == [4, 5]


def test_a_refusal_is_kept_as_well() -> None:
    """Any answer may be lost."""

    async def main() -> None:
        alone = await Alone({"do": do}).open()
        await alone.member.leave("bye")
        alone.call()
        alone.call()
        await asyncio.sleep(1)
        assert alone.answers() == [("Failure", b"1", 1, Refused.__name__)] * 2

    run(main())
