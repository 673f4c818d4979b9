"""The serving side: every call is answered once, whatever its method does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.alone import Alone, forever
from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Calls, Retry
from zagent.errors import (
    CallCancelled,
    DeadlineExceeded,
    EncodeError,
    MemberLost,
    Refused,
    RemoteError,
    UnknownMethod,
)
from zagent.wire.messages import Call, Drain, Goodbye

ONCE = Retry(attempts=1)


class Panic(BaseException):
    """What a Rust extension raises: no Exception."""


def test_an_unknown_method_is_named() -> None:
    """`UnknownMethod`, with the member's name."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.member("m", {})
            with pytest.raises(UnknownMethod, match="m has no method 'explode'"):
                await (await cluster.caller()).call("engine", "explode")

    run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Panic("rust"), GeneratorExit()], ids=repr)
def test_even_a_base_exception_is_an_answer(error: BaseException) -> None:
    """`sys.exit` or a native panic in a method ends its call, not the member."""

    async def main() -> None:
        async with Cluster() as cluster:

            async def do(argument: Any, call: Call) -> str:
                if argument:
                    raise error
                return "fine"

            member = await cluster.member("m", {"do": do})
            calls = await cluster.caller()
            with pytest.raises(RemoteError, match=type(error).__name__):
                await calls.call("engine", "do", True)
            assert await calls.call("engine", "do", False) == "fine"
            assert member.in_flight == 0
            assert cluster.quiet()

    run(main())


class Awkward(Exception):
    """Its ``fields`` are not ours, and it has no text."""

    fields = ("missing",)

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unfinished(RemoteError):
    """Ours, but its constructor does not call ours."""

    def __init__(self) -> None:
        Exception.__init__(self, "unfinished")


class Leaves(Exception):
    """Ends the process of who asks for its text."""

    def __str__(self) -> str:
        raise SystemExit(1)


def odd_field() -> RemoteError:
    error = RemoteError("odd")
    error.type_name = object()  # type: ignore[assignment]
    return error


AWKWARD = [Awkward(1, 2), ValueError("lone \ud800 surrogate"), Unfinished(), Leaves(1, 2), odd_field()]


@pytest.mark.parametrize("error", AWKWARD, ids=lambda error: type(error).__name__)
def test_an_error_that_is_hard_to_describe_is_still_an_answer(error: Exception) -> None:
    """No call hangs because its error cannot be put into words."""

    async def main() -> None:
        async with Cluster() as cluster:

            async def do(argument: Any, call: Call) -> None:
                raise error

            await cluster.member("m", {"do": do})
            with pytest.raises((RemoteError, ValueError)):
                await (await cluster.caller()).call("engine", "do")
            assert cluster.quiet()

    run(main())


def test_a_result_that_cannot_cross_is_an_error_of_its_call() -> None:
    """`EncodeError` naming the type."""

    async def main() -> None:
        async with Cluster() as cluster:

            async def do(argument: Any, call: Call) -> Any:
                return {"result": {1, 2}}

            await cluster.member("m", {"do": do})
            with pytest.raises(EncodeError, match="set"):
                await (await cluster.caller()).call("engine", "do")

    run(main())


def test_a_repeated_call_runs_once_and_is_answered_once() -> None:
    """The same call and attempt while it runs."""

    async def main() -> None:
        started = []

        async def do(argument: Any, call: Call) -> str:
            started.append(call.call)
            await asyncio.sleep(1)
            return "done"

        alone = await Alone({"do": do}).open()
        alone.call()
        alone.call()
        await asyncio.sleep(2)
        assert started == [b"1"]
        assert alone.answers() == [("Reply", b"1", 1, "done")]

    run(main())


def test_a_cancelled_call_is_answered_when_it_has_stopped() -> None:
    """The member's own clean-up comes first, then a `TransientError`: whoever hears it has not cancelled it."""

    async def main() -> None:
        events = []

        async def do(argument: Any, call: Call) -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(0.5)
                events.append("stopped")

        alone = await Alone({"do": do}).open()
        alone.call()
        await asyncio.sleep(1)
        alone.cancel()
        await asyncio.sleep(0.1)
        assert alone.answers() == []
        assert alone.member.in_flight == 1
        await asyncio.sleep(1)
        assert events == ["stopped"]
        assert alone.answers() == [("Failure", b"1", 1, "TransientError")]
        assert alone.member.in_flight == 0

    run(main())


def test_a_call_and_its_cancel_in_one_turn_of_the_loop() -> None:
    """The call is answered although its task had not begun when it was cancelled."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        alone.call()
        alone.cancel()
        await asyncio.sleep(1)
        assert alone.answers() == [("Failure", b"1", 1, "TransientError")]
        assert alone.member.in_flight == 0

    run(main())


def test_a_cancel_that_overtakes_its_call() -> None:
    """The call is answered as cancelled without having run; another attempt runs."""

    async def main() -> None:
        ran = []

        async def do(argument: Any, call: Call) -> str:
            ran.append(call.attempt)
            return "done"

        alone = await Alone({"do": do}).open()
        alone.cancel()
        alone.call()
        alone.call(attempt=2)
        await asyncio.sleep(1)
        assert ran == [2]
        assert alone.answers() == [("Failure", b"1", 1, "TransientError"), ("Reply", b"1", 2, "done")]

    run(main())


def test_the_member_keeps_the_deadline_itself() -> None:
    """For callers that cannot cancel any more: `DeadlineExceeded` when the remaining time is over."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        alone.call(remaining_ms=2500)
        await asyncio.sleep(2.4)
        assert alone.answers() == []
        await asyncio.sleep(0.2)
        assert alone.answers() == [("Failure", b"1", 1, "DeadlineExceeded")]

    run(main())


def test_a_finished_calls_deadline_hits_nobody() -> None:
    """Its timer ends with it."""

    async def main() -> None:
        async def do(argument: Any, call: Call) -> str:
            return "done"

        alone = await Alone({"do": do}).open()
        alone.call(remaining_ms=1000)
        await asyncio.sleep(0.5)
        handles = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert all(handle.cancelled() for handle in handles)
        assert alone.answers() == [("Reply", b"1", 1, "done")]

    run(main())


def test_leaving_answers_everything() -> None:
    """Drain first; what runs longer than the grace fails as `MemberLost`, what ends within it succeeds."""

    async def main() -> None:
        async def do(argument: Any, call: Call) -> str:
            await asyncio.sleep({b"quick": 1, b"slow": 100}[call.call])
            return "done"

        alone = await Alone({"do": do}).open()
        alone.call(b"slow")
        alone.call(b"quick")
        await asyncio.sleep(0.1)
        await alone.member.leave("the cluster stops", grace=5)
        await asyncio.sleep(0.1)
        assert isinstance(alone.said[0][0], Drain)
        assert alone.answers() == [("Reply", b"quick", 1, "done"), ("Failure", b"slow", 1, "MemberLost")]
        assert alone.member.in_flight == 0

    run(main())


def test_leaving_answers_also_what_has_just_come() -> None:
    """A call whose task had no turn yet is answered too."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        alone.call()
        await asyncio.sleep(0)  # arrives in this turn
        assert alone.member.in_flight == 1
        await alone.member.leave("bye")
        await asyncio.sleep(0.1)
        assert alone.answers() == [("Failure", b"1", 1, "MemberLost")]

    run(main())


def test_a_leaving_member_refuses_new_calls() -> None:
    """As `Refused`, not accepted: the caller goes elsewhere and no session is bound here."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        await alone.member.leave("bye")
        alone.call()
        await asyncio.sleep(0.1)
        failure, body = alone.said[-1]
        assert (failure.accepted, body["type"]) == (False, "Refused")
        assert "m is leaving: bye" in body["message"]

    run(main())


def test_a_task_that_refuses_to_stop_does_not_hold_the_exit_up() -> None:
    """Five seconds after the grace, `leave` returns all the same."""

    async def main() -> None:
        async def stubborn(argument: Any, call: Call) -> None:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                await asyncio.sleep(60)

        alone = await Alone({"do": stubborn}).open()
        alone.call()
        await asyncio.sleep(0.1)
        start = asyncio.get_running_loop().time()
        await alone.member.leave("bye")
        assert asyncio.get_running_loop().time() - start == pytest.approx(5.0)
        await asyncio.sleep(100)

    run(main())


@pytest.mark.parametrize("crashed", [True, False])
def test_a_dying_member_says_so_and_leaves_the_answers_to_the_broker(crashed: bool) -> None:
    """Nothing that runs is waited for or answered: the broker knows who must hear what."""

    async def main() -> None:
        alone = await Alone({"do": forever}).open()
        for i in range(3):
            alone.call(b"%d" % i)
        await asyncio.sleep(0.1)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        alone.member.leave_at_once("the scheduler died", crashed)
        assert alone.link.closed == "the scheduler died"
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.1)
        assert [message for message, _ in alone.said] == [Goodbye("the scheduler died", crashed)]

    run(main())


def test_errors_say_whether_the_call_was_taken_on() -> None:
    """Only transient ones undo a session's tentative binding."""

    async def main() -> None:
        errors: dict[bytes, Exception] = {b"1": ValueError("x"), b"2": MemberLost("x")}

        async def do(argument: Any, call: Call) -> None:
            raise errors[call.call]

        alone = await Alone({"do": do}).open()
        alone.call(b"1")
        alone.call(b"2")
        await asyncio.sleep(0.1)
        assert [m.accepted for m, _ in alone.said] == [True, False]

    run(main())


@pytest.mark.parametrize(
    ("end", "error"),
    [("deadline", DeadlineExceeded), ("leave", MemberLost), ("refuse", Refused), ("cancel", CallCancelled)],
)
def test_the_caller_learns_why_its_call_ended(end: str, error: type[Exception]) -> None:
    """Each end has its own class, through the broker and back."""

    async def main() -> None:
        async with Cluster() as cluster:

            async def do(argument: Any, call: Call) -> None:
                if end == "deadline":
                    raise DeadlineExceeded("x")
                if end == "cancel":
                    raise CallCancelled("x")
                await asyncio.sleep(1e6)

            member = await cluster.member("m", {"do": do})
            calls: Calls = await cluster.caller(ONCE)
            if end == "refuse":
                member._closing = "bye"
            task = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(1)
            if end == "leave":
                await member.leave("bye")
            with pytest.raises(error):
                await task
            assert cluster.quiet()

    run(main())
