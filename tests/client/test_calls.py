"""Calls into pools on virtual time: one answer each, retries by kind, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Calls, Retry
from zagent.errors import (
    CallerError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    EncodeError,
    EngineError,
    InvalidRequest,
    MemberLost,
    Overloaded,
    Refused,
    TransientError,
)
from zagent.wire.codec import encode_header
from zagent.wire.messages import Call, Failure, Reply


def now() -> float:
    return asyncio.get_running_loop().time()


class Recorder:
    """A member's method: notes the calls it gets, answers as ``behave`` says."""

    def __init__(self, behave: Any = None) -> None:
        self.calls: list[Call] = []
        self.arguments: list[Any] = []
        self.cancelled: list[float] = []
        self._behave = behave

    async def __call__(self, argument: Any, call: Call) -> Any:
        self.calls.append(call)
        self.arguments.append(argument)
        try:
            value = self._behave(len(self.calls)) if self._behave else argument
            return await value if asyncio.iscoroutine(value) else value
        except asyncio.CancelledError:
            self.cancelled.append(now())
            raise


def failing(*errors: Exception, then: Any = "done") -> Any:
    """Raises ``errors`` in turn, then returns."""

    def behave(number: int) -> Any:
        if number <= len(errors):
            raise errors[number - 1]
        return then

    return behave


def test_a_call_returns_what_the_method_returned() -> None:
    """Argument there, result back."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.member("m", {"echo": Recorder()})
            calls = await cluster.caller()
            assert await calls.call("engine", "echo", {"x": [1, None, "y"]}) == {"x": [1, None, "y"]}
            assert len(calls) == 0
            assert cluster.quiet()

    run(main())


def test_call_ids_are_unique_over_callers() -> None:
    """No two calls of two links share an id."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder()
            await cluster.member("m", {"echo": recorder}, credits=1000)
            callers = [await cluster.caller() for _ in range(3)]
            await asyncio.gather(*(c.call("engine", "echo", i) for c in callers for i in range(50)))
            ids = {call.call for call in recorder.calls}
            assert len(ids) == 150
            assert {len(call) for call in ids} == {16}

    run(main())


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no"), CallerError("no"), ValueError("no"), EngineError("broke"), KeyError("k")],
    ids=lambda e: type(e).__name__,
)
def test_an_error_that_is_not_transient_is_raised_at_once(error: Exception) -> None:
    """One attempt, the same class, the remote traceback as cause (pitfalls K20, K36)."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(failing(error))
            await cluster.member("m", {"do": recorder})
            with pytest.raises(type(error)) as caught:
                await (await cluster.caller()).call("engine", "do")
            assert str(caught.value) == str(error)
            assert "in __call__" in str(caught.value.__cause__)
            assert len(recorder.calls) == 1
            assert cluster.core.pools["engine"].members["m"].takes_calls

    run(main())


@pytest.mark.parametrize(
    "error", [MemberLost("x"), Refused("x"), Overloaded("x"), TransientError("x")], ids=lambda e: type(e).__name__
)
def test_a_transient_error_is_tried_again_as_the_next_attempt(error: Exception) -> None:
    """Same id, attempt + 1, with the waits of `Retry` in between."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(failing(error, error))
            await cluster.member("m", {"do": recorder})
            calls, attempts = await cluster.caller(Retry(first_wait_s=1.0)), []
            start = now()
            assert await calls.call("engine", "do", on_attempt=attempts.append) == "done"
            assert [call.attempt for call in recorder.calls] == attempts == [1, 2, 3]
            assert len({call.call for call in recorder.calls}) == 1
            assert now() - start == pytest.approx(1.0 + 2.0)
            assert calls.retries == 2

    run(main())


def test_the_last_attempts_error_is_raised() -> None:
    """After `Retry.attempts` attempts, and no more."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(failing(*(Refused(f"no {i}") for i in range(1, 9))))
            await cluster.member("m", {"do": recorder})
            with pytest.raises(Refused, match="no 3"):
                await (await cluster.caller(Retry(attempts=3))).call("engine", "do")
            assert len(recorder.calls) == 3

    run(main())


def test_waits_double_up_to_the_longest() -> None:
    """0.05 s, 0.1 s … 2 s."""
    retry = Retry()
    assert [retry.wait(n) for n in (1, 2, 3, 6, 7, 50)] == [0.05, 0.1, 0.2, 1.6, 2.0, 2.0]


def test_a_lost_members_call_runs_on_another() -> None:
    """The first member goes while it has the call: attempt 2 elsewhere (pitfalls B4, B5)."""

    async def main() -> None:
        async with Cluster() as cluster:
            first, second = Recorder(lambda n: asyncio.sleep(1000)), Recorder()
            await cluster.member("a", {"do": first})
            dying = cluster.links[-1]
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do", "x", session="s"))
            await asyncio.sleep(1)
            member = await cluster.member("b", {"do": second})
            dying.close()
            assert await task == "x"
            assert (first.calls[0].attempt, second.calls[0].attempt) == (1, 2)
            assert first.calls[0].call == second.calls[0].call
            assert member.in_flight == 0
            for leftover in asyncio.all_tasks() - {asyncio.current_task()}:
                leftover.cancel()  # the dead member's own task
            await asyncio.sleep(0)

    run(main())


def test_a_call_to_a_named_member_is_not_tried_elsewhere() -> None:
    """`MemberLost` at once, in one attempt."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.member("m", {"do": Recorder()})
            calls, attempts = await cluster.caller(), []
            with pytest.raises(MemberLost, match="nobody"):
                await calls.call("engine", "do", member="nobody", on_attempt=attempts.append)
            assert attempts == [1]

    run(main())


# ---- deadlines --------------------------------------------------------------------------------------------------


def test_a_call_ends_at_its_deadline_and_the_member_stops() -> None:
    """`DeadlineExceeded` naming pool and method; the lease comes back (pitfalls A5, J7)."""

    async def main() -> None:
        async with Cluster(latency=0.01) as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(1000))
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            start = now()
            with pytest.raises(DeadlineExceeded, match=r"no answer from pool 'engine' to 'do' in time \(attempt 1\)"):
                await calls.call("engine", "do", timeout=5)
            assert now() - start == pytest.approx(5)
            await asyncio.sleep(0.1)
            assert len(recorder.cancelled) == 1
            assert cluster.quiet()
            assert len(calls) == 0

    run(main())


def test_the_deadline_covers_all_attempts_and_their_waits() -> None:
    """Waiting to retry ends at the deadline too, not seconds after it."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(failing(*[Refused("x")] * 100))
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller(Retry(attempts=100, first_wait_s=4.0, longest_wait_s=60.0))
            start = now()
            with pytest.raises(DeadlineExceeded):
                await calls.call("engine", "do", timeout=10)
            assert now() - start == pytest.approx(10)
            assert [call.remaining_ms for call in recorder.calls[:2]] == [10_000, 6_000]

    run(main())


def test_a_call_that_waits_in_the_broker_ends_at_its_deadline() -> None:
    """No member at all: no hang (pitfall B12)."""

    async def main() -> None:
        async with Cluster() as cluster:
            calls = await cluster.caller()
            with pytest.raises(DeadlineExceeded):
                await calls.call("engine", "do", timeout=3)
            await asyncio.sleep(1)
            assert now() < 5
            assert cluster.core.dispatch.pending == 0

    run(main())


def test_without_a_timeout_there_is_none() -> None:
    """A long call is not cut off."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(50_000, "late"))
            await cluster.member("m", {"do": recorder})
            assert await (await cluster.caller()).call("engine", "do") == "late"
            assert recorder.calls[0].remaining_ms == -1

    run(main())


# ---- cancellation -----------------------------------------------------------------------------------------------


def test_cancelling_a_call_stops_it_at_the_member() -> None:
    """A CANCEL goes out, the member's task sees CancelledError, the lease comes back (pitfalls J7, K7)."""

    async def main() -> None:
        async with Cluster(latency=0.1) as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(1000))
            member = await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(10)
            cancelled_at = now()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(0.5)
            assert recorder.cancelled == [pytest.approx(cancelled_at + 0.2)]
            assert member.in_flight == 0
            assert cluster.quiet()
            assert calls.late == 0

    run(main())


@pytest.mark.parametrize("latency", [0.0, 0.1])
@pytest.mark.parametrize("turns", range(8))
def test_a_call_cancelled_on_its_way_leaves_nothing(latency: float, turns: int) -> None:
    """Whatever turn of the loop the cancel falls into: before, while and after the call reaches its member."""

    async def main() -> None:
        async with Cluster(latency=latency) as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(1000))
            member = await cluster.member("m", {"do": recorder}, credits=1)
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(1)
            assert member.in_flight == 0
            assert cluster.quiet()

    run(main())


def test_a_storm_of_cancels_ends_with_equal_counts() -> None:
    """The broker's counts and the engines' own are equal whenever callers pause, and zero at the end."""

    async def main() -> None:
        async with Cluster(latency=0.001) as cluster:
            servers = [await cluster.engine(i, credits=4, decode_tokens_per_s=100) for i in range(3)]
            manager = await cluster.manager()
            tasks = [
                asyncio.create_task(manager.generate(f"s{i}", [1, i + 1], {"max_new_tokens": 50 + i % 40}))
                for i in range(60)
            ]
            for round_ in range(5):
                await asyncio.sleep(0.1)
                for task in tasks[round_::7]:
                    task.cancel()
                await asyncio.sleep(0.01)
                own = {f"engine-{i}": server.engine.in_flight() for i, server in enumerate(servers)}
                assert cluster.in_flight() == own
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(r).__name__ for r in results} == {"TokenOutput", "CancelledError"}
            await asyncio.sleep(0.1)
            assert cluster.quiet()

    run(main())


# ---- late and strange answers -----------------------------------------------------------------------------------


def test_a_late_reply_is_counted_and_given_to_nobody() -> None:
    """After a timeout the next call gets its own answer, not the late one (pitfall J7)."""

    async def main() -> None:
        async with Cluster() as cluster:
            calls = await cluster.caller()

            async def stubborn(argument: Any, call: Call) -> str:
                if argument == "slow":
                    cluster.router.send(b"d" + calls.link.nonce, late_reply(call))
                return f"answer to {argument}"

            await cluster.member("m", {"do": stubborn})
            await calls.call("engine", "do", "slow")
            assert await calls.call("engine", "do", "next") == "answer to next"

    def late_reply(call: Call) -> list[bytes]:
        old = call.call[:-8] + (10**6).to_bytes(8, "big")
        return [encode_header(Reply(old, 1)), b"\xa5wrong"]

    run(main())


def test_answers_nobody_waits_for_are_counted() -> None:
    """Unknown calls, old attempts and second answers."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(1, "mine"))
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(0.5)
            me, call = b"d" + calls.link.nonce, recorder.calls[0]
            cluster.router.send(me, [encode_header(Reply(b"unknown", 1)), b"\xc0"])
            cluster.router.send(me, [encode_header(Reply(call.call, 2)), b"\xa5wrong"])
            cluster.router.send(me, [encode_header(Failure(call.call, 0)), b"\x80"])
            assert await task == "mine"
            cluster.router.send(me, [encode_header(Reply(call.call, 1)), b"\xa5wrong"])
            await asyncio.sleep(1)
            assert calls.late == 4

    run(main())


@pytest.mark.parametrize("body", [[], [b"\xc1"], [b"\xc0"], [b"\x90"], [b"\x81\xa6fields\x05"]], ids=repr)
def test_an_unreadable_failure_still_ends_its_call(body: list[bytes]) -> None:
    """With an error, instead of waiting for ever."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(10, "never"))
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(1)
            cluster.router.send(b"d" + calls.link.nonce, [encode_header(Failure(recorder.calls[0].call, 1)), *body])
            await asyncio.wait([task], timeout=1)
            assert task.done()
            assert isinstance(task.exception(), Exception)
            await asyncio.sleep(10)

    run(main())


def test_an_unreadable_reply_ends_its_call() -> None:
    """As `DecodeError`."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(lambda n: asyncio.sleep(10, "never"))
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            task = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(1)
            cluster.router.send(b"d" + calls.link.nonce, [encode_header(Reply(recorder.calls[0].call, 1)), b"\xc1"])
            with pytest.raises(DecodeError):
                await task
            await asyncio.sleep(10)

    run(main())


@pytest.mark.parametrize("session", [5, b"s", ("a", 1), None])
def test_a_session_is_text(session: Any) -> None:
    """The broker would drop the call as malformed, and nobody would answer."""

    async def main() -> None:
        async with Cluster() as cluster:
            calls = await cluster.caller()
            with pytest.raises(InvalidRequest, match="a session is text, got"):
                await calls.call("engine", "do", session=session)
            assert cluster.quiet()

    run(main())


def test_an_infinite_timeout_is_none() -> None:
    """As with asyncio's own."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder()
            await cluster.member("m", {"do": recorder})
            assert await (await cluster.caller()).call("engine", "do", 1, timeout=float("inf")) == 1
            assert recorder.calls[0].remaining_ms == -1

    run(main())


def test_an_argument_that_cannot_cross_fails_before_anything_is_sent() -> None:
    """`EncodeError` here; the member sees nothing."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder()
            await cluster.member("m", {"do": recorder})
            calls = await cluster.caller()
            with pytest.raises(EncodeError, match="set"):
                await calls.call("engine", "do", {1, 2})
            with pytest.raises(EncodeError):
                await calls.call("engine", "do", session="s" * 100_000)
            assert recorder.calls == []
            assert len(calls) == 0

    run(main())


def test_the_caller_may_change_its_argument_after_the_call() -> None:
    """The member, and a second attempt, see what was there at call time (pitfall C13)."""

    async def main() -> None:
        async with Cluster() as cluster:
            recorder = Recorder(failing(Refused("again")))
            await cluster.member("m", {"do": recorder})
            calls, ids = await cluster.caller(), [1, 2]
            task = asyncio.create_task(calls.call("engine", "do", ids))
            await asyncio.sleep(0)
            ids += [3, 4]
            await task
            assert recorder.arguments == [[1, 2], [1, 2]]

    run(main())


# ---- the link's end ---------------------------------------------------------------------------------------------


def test_closing_the_link_fails_what_waits() -> None:
    """`ConnectionLost` with the reason; a call after that fails at once."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.member("m", {"do": Recorder(lambda n: asyncio.sleep(1000))})
            calls = await cluster.caller()
            tasks = [asyncio.create_task(calls.call("engine", "do")) for _ in range(3)]
            await asyncio.sleep(1)
            calls.link.close("the cluster has ended")
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {(type(r), "the cluster has ended" in str(r)) for r in results} == {(ConnectionLost, True)}
            with pytest.raises(ConnectionLost):
                await calls.call("engine", "do")
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


def test_a_hundred_concurrent_first_calls() -> None:
    """All share one link, and each gets its own answer (pitfall K8)."""

    async def main() -> None:
        async with Cluster(latency=0.01) as cluster:
            await cluster.member("m", {"echo": Recorder()}, credits=7)
            calls: Calls = await cluster.caller()
            answers = await asyncio.gather(*(calls.call("engine", "echo", i) for i in range(100)))
            assert answers == list(range(100))
            assert cluster.quiet()

    run(main())


def test_a_full_broker_is_tried_again_until_there_is_room() -> None:
    """`Overloaded` is transient: with patience every call is answered."""

    async def main() -> None:
        async with Cluster(max_pending=2) as cluster:
            await cluster.member("m", {"do": Recorder(lambda n: asyncio.sleep(0.1, n))}, credits=1)
            calls = await cluster.caller()
            answers = await asyncio.gather(*(calls.call("engine", "do") for _ in range(10)))
            assert sorted(answers) == list(range(1, 11))
            assert calls.retries > 0

    run(main())


def test_each_call_is_answered_in_the_lane_of_its_kind() -> None:
    """Calls to the broker and to one member travel on the control lane, past data."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.member("m", {"do": Recorder()})
            calls = await cluster.caller()
            lanes: list[bytes] = []
            feed = cluster.router.receiver
            assert feed is not None

            def watch(batch: Any) -> None:
                lanes.extend(sender[:1] for sender, _ in batch if sender[1:] == calls.link.nonce)
                feed(batch)

            cluster.router.receiver = watch
            await calls.call("engine", "do")
            await calls.call("engine", "do", member="m")
            await calls.call("broker", "status")
            assert lanes == [b"d", b"c", b"c"]

    run(main())


def test_a_call_from_another_event_loop_is_refused_at_once() -> None:
    """Its answer would come on the link's own, and the call wait for ever: `asyncio.run` in a plain tool does that."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            calls = await cluster.caller()
            error: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    asyncio.run(calls.call("engine", "stats"))
                except BaseException as raised:
                    error.append(raised)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert isinstance(error[0], CallerError)
            assert "another event loop" in str(error[0])
            assert len(calls) == 0

    run(main())
