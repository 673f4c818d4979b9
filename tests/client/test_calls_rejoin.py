"""What waits when a broker dies, or forgets its caller, is sent again; suspects, progress, renewed arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.alone import Asking
from support.virtual_clock import run
from zagent.client.calls import Retry
from zagent.errors import (
    DeadlineExceeded,
    EncodeError,
    InvalidRequest,
    MemberLost,
    PoisonedRequest,
    Refused,
    to_wire,
)
from zagent.wire.messages import BROKER, Call, Cancel, Failure, HelloWanted, Message, Progress, Reply


async def rejoin(asking: Asking, incarnation: int) -> list[tuple[Call, Any]]:
    """A hello that finds a broker which knows nothing of the caller; the calls that follow, with their arguments."""
    asking.take()
    asking.send(HelloWanted())
    await asyncio.sleep(0.1)
    asking.welcome(incarnation)
    await asyncio.sleep(0.1)
    return calls(asking)


def calls(asking: Asking) -> list[tuple[Call, Any]]:
    return [(message, body) for message, body in asking.said if isinstance(message, Call)]


async def asked(asking: Asking, *arguments: Any, **options: Any) -> list[asyncio.Task[Any]]:
    """Calls under way."""
    tasks = [asyncio.create_task(asking.calls.call("p", "do", argument, **options)) for argument in arguments]
    await asyncio.sleep(0.1)
    return tasks


def reply(asking: Asking, call: Call, value: Any, kind: Callable[[bytes, int], Message] = Reply) -> None:
    asking.send(kind(call.call, call.attempt), value)


async def fail(asking: Asking, error: Exception) -> Call:
    """The last attempt fails; the next one."""
    call = calls(asking)[-1][0]
    asking.send(Failure(call.call, call.attempt), to_wire(error))
    await asyncio.sleep(10)
    return calls(asking)[-1][0]


def test_a_new_broker_gets_the_same_attempts() -> None:
    """In order, with their arguments and headers: it may find them where they run. Not what is answered."""

    async def main() -> None:
        asking = await Asking(Retry(attempts=1)).open()
        tasks = await asked(asking, 0, 1, 2, session="s")
        sent = calls(asking)
        reply(asking, sent[0][0], "zero")
        await asyncio.sleep(0.1)
        for incarnation in (2, 3):
            assert await rejoin(asking, incarnation) == sent[1:]
        assert {(call.attempt, call.incarnation) for call, _ in sent} == {(1, 1)}
        for number in (1, 2):
            reply(asking, sent[number][0], number)
        assert await asyncio.gather(*tasks) == ["zero", 1, 2]
        assert asking.calls.retries == asking.calls.late == 0

    run(main())


def test_a_broker_that_had_forgotten_us_gets_the_next_attempts() -> None:
    """It has cancelled the last ones, whose answers come too late. The header says that they may have begun."""

    async def main() -> None:
        asking = await Asking(Retry(attempts=1)).open()
        told: list[int] = []
        (task,) = await asked(asking, "x", on_attempt=told.append)
        ((first, _),) = calls(asking)
        for attempt in (2, 3, 4):
            assert await rejoin(asking, 1) == [(first._replace(attempt=attempt, incarnation=0), "x")]
        reply(asking, first, "late")
        reply(asking, first._replace(attempt=4), "four")
        assert await task == "four"
        assert told == [1, 2, 3, 4]
        assert (asking.calls.retries, asking.calls.late) == (3, 1)

    run(main())


def test_only_failures_count_towards_the_limit_of_attempts() -> None:
    """Not what brokers forget."""

    async def main() -> None:
        asking = await Asking(Retry(attempts=2)).open()
        (task,) = await asked(asking, "x")
        for _ in range(5):
            await rejoin(asking, 1)
        assert (await fail(asking, Refused("no"))).attempt == 7
        with pytest.raises(Refused, match="at last"):
            await fail(asking, Refused("at last"))
            await task

    run(main())


def test_what_was_answered_just_before_the_welcome_is_not_sent_again() -> None:
    """Though its coroutine has had no turn yet."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        ((call, _),) = calls(asking)
        asking.take()
        asking.send(HelloWanted())
        await asyncio.sleep(0.1)
        reply(asking, call, "done")
        asking.welcome(2)
        assert await task == "done"
        await asyncio.sleep(0.1)
        assert calls(asking) == []

    run(main())


def test_what_brokers_forget_does_not_lengthen_the_waits() -> None:
    """They double with each failure of the call itself."""

    async def main() -> None:
        asking = await Asking(Retry(first_wait_s=1)).open()
        (task,) = await asked(asking, "x")
        for _ in range(5):
            await rejoin(asking, 1)
        call = calls(asking)[-1][0]
        asking.send(Failure(call.call, call.attempt), to_wire(Refused("no")))
        await asyncio.sleep(1.1)
        assert calls(asking)[-1][0].attempt == call.attempt + 1
        reply(asking, calls(asking)[-1][0], "done")
        assert await task == "done"

    run(main())


@pytest.mark.parametrize("incarnation", [1, 2])
def test_what_a_hello_held_back_is_sent_once_and_as_new(incarnation: int) -> None:
    """It has never been sent: neither a further attempt, nor one that may have begun."""

    async def main() -> None:
        asking = await Asking().open()
        asking.send(HelloWanted())
        await asyncio.sleep(0.1)
        (task,) = await asked(asking, "x")
        assert calls(asking) == []
        asking.welcome(incarnation)
        await asyncio.sleep(0.1)
        ((call, _),) = calls(asking)
        assert (call.attempt, call.incarnation) == (1, incarnation)
        ((again, _),) = await rejoin(asking, incarnation)
        assert again == call._replace(attempt=2, incarnation=0) if incarnation == 1 else call
        reply(asking, again, "done")
        assert await task == "done"

    run(main())


def test_a_hello_that_changes_nothing_sends_nothing_again() -> None:
    """The broker has never forgotten us."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        ((call, _),) = calls(asking)
        asking.take()
        asking.send(HelloWanted())
        asking.welcome(1, known=True)
        await asyncio.sleep(0.1)
        assert calls(asking) == []
        reply(asking, call, "done")
        assert await task == "done"

    run(main())


def test_what_is_sent_again_has_the_time_that_is_left() -> None:
    """And ends at its deadline, as ever."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x", timeout=10)
        await asyncio.sleep(3.9)
        ((call, _),) = await rejoin(asking, 2)
        assert call.remaining_ms == pytest.approx(5_900, abs=10)
        with pytest.raises(DeadlineExceeded, match=r"attempt 1"):
            await task
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.1)
        await asyncio.sleep(1)
        assert asking.of(Cancel) == [Cancel(call.call, 1)]

    run(main())


def test_calls_of_the_control_lane_stay_there() -> None:
    """To one member, and to the broker itself."""

    async def main() -> None:
        asking = await Asking().open()
        tasks = [
            asyncio.create_task(asking.calls.call("p", "do", member="m")),
            asyncio.create_task(asking.calls.call(BROKER, "status")),
        ]
        await asyncio.sleep(0.1)
        lanes: list[bytes] = []

        def got(batch: Any) -> None:
            lanes.extend(sender[:1] for sender, _ in batch)
            asking._got(batch)

        asking.router.receiver = got
        again = await rejoin(asking, 2)
        assert lanes == [b"d", b"c", b"c", b"c"]
        for call, _ in again:
            reply(asking, call, 1)
        await asyncio.gather(*tasks)

    run(main())


def test_what_waits_between_two_attempts_is_not_sent_before_its_time() -> None:
    """Then it goes to whichever broker there is, as a fresh attempt."""

    async def main() -> None:
        asking = await Asking(Retry(first_wait_s=5)).open()
        (task,) = await asked(asking, "x")
        ((first, _),) = calls(asking)
        asking.send(Failure(first.call, 1), to_wire(Refused("no")))
        await asyncio.sleep(1)
        assert await rejoin(asking, 2) == []
        await asyncio.sleep(5)
        ((second, _),) = calls(asking)
        assert (second.attempt, second.incarnation) == (2, 2)
        reply(asking, second, "done")
        assert await task == "done"

    run(main())


def test_a_call_cancelled_during_a_hello_is_not_sent_again() -> None:
    """Its cancel is: a member may still run it."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        ((call, _),) = calls(asking)
        asking.take()
        asking.send(HelloWanted())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        asking.welcome(2)
        await asyncio.sleep(0.1)
        assert {message for message, _ in asking.said[2:]} == {Cancel(call.call, 1)}

    run(main())


@pytest.mark.parametrize(("pulses", "again"), [(0, 1), (1, 1), (2, 0)])
def test_cancels_are_sent_again_until_the_second_pulse(pulses: int, again: int) -> None:
    """The broker may have died with them."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        task.cancel()
        await asyncio.wait([task])
        for _ in range(pulses):
            asking.pulse()
        await asyncio.sleep(0.1)
        assert await rejoin(asking, 2) == []
        assert len(asking.of(Cancel)) == again

    run(main())


# ---- suspects -------------------------------------------------------------------------------------------------------


def test_who_was_aboard_a_crash_is_a_suspect_from_then_on() -> None:
    """Whatever the later failures are; a member killed from outside makes none."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        errors = [MemberLost("a"), Refused("b"), MemberLost("c", crashed=True), Refused("d"), MemberLost("e")]
        suspects = [(await fail(asking, error)).suspect for error in errors]
        assert suspects == [False, False, True, True, True]
        ((again, _),) = await rejoin(asking, 1)
        assert again.suspect
        with pytest.raises(PoisonedRequest, match="guilty"):
            await fail(asking, PoisonedRequest("guilty"))
            await task

    run(main())


@pytest.mark.parametrize(
    ("error", "options"),
    [(MemberLost("x", repeatable=False, crashed=True), {}), (MemberLost("x", crashed=True), {"member": "m"})],
)
def test_a_crash_ends_what_is_not_tried_again(error: Exception, options: dict[str, Any]) -> None:
    """Methods that may not repeat, and calls to that member and no other."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x", **options)
        with pytest.raises(MemberLost):
            await fail(asking, error)
            await task
        assert len(calls(asking)) == 1

    run(main())


# ---- progress and renewed arguments ---------------------------------------------------------------------------------


def test_progress_reaches_its_call() -> None:
    """In order; that of other attempts, of other calls and after the answer does not, and is no answer."""

    async def main() -> None:
        asking = await Asking().open()
        told: list[Any] = []
        (task,) = await asked(asking, "x", on_progress=told.append)
        ((call, _),) = calls(asking)
        for progress in (call, call._replace(attempt=2), call._replace(call=b"another"), call):
            reply(asking, progress, len(told), Progress)
        reply(asking, call, "done")
        reply(asking, call, "late", Progress)
        assert await task == "done"
        reply(asking, call, "later", Progress)
        await asyncio.sleep(0.1)
        assert len(told) == 2
        assert asking.calls.late == 0

    run(main())


def test_progress_nobody_asked_for_is_dropped() -> None:
    """The call goes on."""

    async def main() -> None:
        asking = await Asking().open()
        (task,) = await asked(asking, "x")
        ((call, _),) = calls(asking)
        reply(asking, call, 1, Progress)
        reply(asking, call, "done")
        assert await task == "done"

    run(main())


@pytest.mark.parametrize(("incarnation", "told"), [(1, ["before", "after"]), (2, ["before"])])
def test_progress_after_a_new_broker_has_gaps(incarnation: int, told: list[str]) -> None:
    """So it is not used; that of a further attempt begins anew, and is."""

    async def main() -> None:
        asking = await Asking().open()
        got: list[Any] = []
        (task,) = await asked(asking, "x", on_progress=got.append)
        reply(asking, calls(asking)[0][0], "before", Progress)
        await asyncio.sleep(0.1)
        ((call, _),) = await rejoin(asking, incarnation)
        reply(asking, call, "after", Progress)
        await asyncio.sleep(0.1)
        assert got == told
        following = await fail(asking, MemberLost("gone"))
        reply(asking, following, "next", Progress)
        reply(asking, following, "done")
        assert await task == "done"
        assert got == [*told, "next"]

    run(main())


def test_each_further_attempt_asks_for_its_argument() -> None:
    """Whether it failed or was forgotten; None = as before. The same attempt keeps its own."""

    async def main() -> None:
        asking = await Asking().open()
        arguments = iter(["two", None, "four"])
        (task,) = await asked(asking, "one", renew=lambda argument: next(arguments))
        for incarnation in (2, 3):
            assert [body for _, body in await rejoin(asking, incarnation)] == ["one"]
        await fail(asking, MemberLost("gone"))
        await fail(asking, MemberLost("gone"))
        assert [body for _, body in await rejoin(asking, 3)] == ["four"]
        reply(asking, calls(asking)[-1][0], "done")
        assert await task == "done"
        assert next(arguments, "used up") == "used up"

    run(main())


def test_renewed_arguments_arrive() -> None:
    """In the order they were given."""

    async def main() -> None:
        asking = await Asking().open()
        arguments = iter(["two", None, "four"])
        (task,) = await asked(asking, "one", renew=lambda argument: next(arguments))
        for _ in range(3):
            await fail(asking, MemberLost("gone"))
        assert [(call.attempt, body) for call, body in calls(asking)] == [
            (1, "one"),
            (2, "two"),
            (3, "two"),
            (4, "four"),
        ]
        reply(asking, calls(asking)[-1][0], "done")
        assert await task == "done"

    run(main())


def test_an_argument_is_renewed_from_the_one_before() -> None:
    """As it was sent: what its owner has made of it since changes no attempt."""

    async def main() -> None:
        asking = await Asking().open()
        argument = [1]
        (task,) = await asked(asking, argument, renew=lambda former: [*former, 2])
        argument.clear()
        for _ in range(2):
            await fail(asking, MemberLost("gone"))
        assert [body for _, body in calls(asking)] == [[1], [1, 2], [1, 2, 2]]
        reply(asking, calls(asking)[-1][0], "done")
        await task

    run(main())


@pytest.mark.parametrize("forgotten", [True, False])
@pytest.mark.parametrize("error", [InvalidRequest("nothing left"), EncodeError("set")], ids=repr)
def test_an_argument_that_cannot_be_renewed_ends_its_call_alone(error: Exception, *, forgotten: bool) -> None:
    """With that error; the others go on."""

    async def main() -> None:
        asking = await Asking().open()

        def renew(argument: Any) -> Any:
            if isinstance(error, EncodeError):
                return {1, 2}
            raise error

        (broken,) = await asked(asking, "x", renew=renew)
        (other,) = await asked(asking, "y")
        first, second = (call for call, _ in calls(asking))
        if forgotten:
            ((second, _),) = await rejoin(asking, 1)
        else:
            asking.send(Failure(first.call, 1), to_wire(Refused("no")))
        with pytest.raises(type(error)):
            await broken
        reply(asking, second, "done")
        assert await other == "done"
        assert len(asking.calls) == 0

    run(main())


@pytest.mark.parametrize("body", ["readable", b"\xc1"])
def test_progress_that_cannot_be_used_ends_its_call(body: Any) -> None:
    """With the error, at once; the member is told to stop."""

    async def main() -> None:
        asking = await Asking().open()

        def refuse(value: Any) -> None:
            raise ValueError(value)

        (task,) = await asked(asking, "x", on_progress=refuse)
        ((call, _),) = calls(asking)
        reply(asking, call, body, Progress)
        with pytest.raises(ValueError, match="readable" if body == "readable" else "xc1"):
            await task
        await asyncio.sleep(0.1)
        assert asking.of(Cancel) == [Cancel(call.call, 1)]

    run(main())
