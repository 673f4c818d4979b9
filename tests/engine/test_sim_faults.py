"""Unit tests on virtual time: the fault script, decided and carried out."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest

from support.sim_engines import answer_now, request, started
from support.virtual_clock import run
from zagent.config import SimConfig
from zagent.engine.base import ENGINE_DIED, Death
from zagent.engine.sim import build
from zagent.engine.sim.faults import FaultScript, parse_faults
from zagent.errors import ConfigError, EngineError, InvalidRequest

PROMPT = np.arange(10, 210, dtype=np.int32)


def struck(entry: dict, calls: int, period: float = 0.0, index: int = 0) -> list[int]:
    """Numbers of the calls (from 1, one every ``period`` seconds from 0 on) that the entry strikes."""
    script = FaultScript(parse_faults([entry], 32_000), index)
    verdicts = [script.next_call(i * period, PROMPT) for i in range(calls)]
    return [i for i, verdict in enumerate(verdicts, 1) if verdict.effect or verdict.factor != 1]


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        ({"at_call": 3}, [3]),
        ({"at_call": 3, "count": 2}, [3, 4]),
        ({"at_call": 3, "for_s": 2.5}, [3, 4, 5]),
        ({"every": 3}, [3, 6, 9]),
        ({"every": 3, "count": 2}, [3, 6]),
        ({"every": 3, "for_s": 4}, [3, 6]),
        ({"at_s": 7}, [8, 9, 10]),
        ({"at_s": 6.5, "count": 1}, [8]),
        ({"at_s": 2, "for_s": 3}, [3, 4, 5]),
        ({"token": 10, "count": 2}, [1, 2]),
        ({"token": 9}, []),
        ({"at_call": 1, "engine": 0}, [1]),
        ({"at_call": 1, "engine": 1}, []),
    ],
)
def test_triggers_and_their_limits(trigger, expected):
    """Ten calls, one a second: each trigger strikes the calls that its limits leave."""
    assert struck({"do": "error", **trigger}, calls=10, period=1.0) == expected


def test_slow_without_a_trigger_is_slow_from_the_start():
    """It strikes every call, and until `for_s` if that is given."""
    assert struck({"do": "slow", "factor": 10}, 3) == [1, 2, 3]
    script = FaultScript(parse_faults([{"do": "slow", "factor": 10, "for_s": 2}], 32_000), 0)
    assert [script.next_call(now, PROMPT).factor for now in (1.0, 1.9, 2.0)] == [10, 10, 1]


def test_several_faults_on_one_call():
    """Factors multiply; of several effects the first in the script wins."""
    entries = [
        {"do": "slow", "factor": 2},
        {"do": "slow", "factor": 3, "every": 1},
        {"do": "hang", "at_call": 1},
        {"do": "error", "every": 1},
    ]
    verdict = FaultScript(parse_faults(entries, 32_000), 0).next_call(0.0, PROMPT)
    assert (verdict.effect, verdict.factor) == ("hang", 6)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"do": "explode", "every": 1}, r"faults\[0\].do='explode'"),
        ({"every": 1}, "'do' is missing"),
        ({"do": "error", "evry": 1}, "unknown key 'evry', did you mean 'every'"),
        ({"do": "error"}, "needs one trigger"),
        ({"do": "error", "every": 1, "at_call": 1}, "more than one trigger: at_call, every"),
        ({"do": "error", "every": 0}, "every=0"),
        ({"do": "error", "every": "2"}, "every='2'"),
        ({"do": "error", "at_s": -1}, "at_s=-1"),
        ({"do": "error", "token": 32_000}, "token=32000"),
        ({"do": "error", "every": 1, "engine": "all"}, "engine='all'"),
        ({"do": "error", "every": 1, "engine": -1}, "engine=-1"),
        ({"do": "slow"}, "'factor'"),
        ({"do": "slow", "factor": 0}, "factor=0"),
        ({"do": "error", "every": 1, "factor": 2}, "'factor'"),
        ({"do": "exit", "at_call": 1, "count": 2}, "'count'"),
    ],
)
def test_a_bad_entry_is_refused_at_build(entry, message):
    """`ConfigError` names entry and key."""
    with pytest.raises(ConfigError, match=message):
        build(sim=SimConfig(faults=(entry,)), name="e", index=0)


@pytest.mark.parametrize(("do", "error"), [("error", EngineError), ("refuse", InvalidRequest)])
def test_error_and_refuse_raise_for_that_call_only(do, error):
    """The struck call raises, naming the engine; the next is answered; nothing stays in flight."""
    engine = run(started(faults=({"do": do, "at_call": 1},)))
    with pytest.raises(error, match="engine-0"):
        answer_now(engine, request(PROMPT))
    assert answer_now(engine, request(PROMPT)).token_ids.size == 8
    assert engine.in_flight() == 0


def test_refused_requests_are_no_calls():
    """A request that is invalid by itself does not advance the call counter."""
    engine = run(started(faults=({"do": "error", "at_call": 1},)))
    with pytest.raises(InvalidRequest):
        answer_now(engine, request([]))
    with pytest.raises(EngineError):
        answer_now(engine, request(PROMPT))


def test_abort_returns_half_the_tokens():
    """Half the answer, in half the decode time, with reason `abort`; the rest continues it exactly."""

    async def main():
        engine = await started(decode_tokens_per_s=1, faults=({"do": "abort", "at_call": 1},))
        half = await engine.generate(request(PROMPT, 9, logprobs=True))
        took = asyncio.get_running_loop().time()
        rest = await engine.generate(request(np.concatenate([PROMPT, half.token_ids]), 5))
        whole = await engine.generate(request(PROMPT, 9))
        return half, took, rest, whole

    half, took, rest, whole = run(main())
    assert (half.stop_reason, half.token_ids.size, half.log_probs.size, half.versions) == ("abort", 4, 4, [(0, 0, 4)])
    assert took == pytest.approx(4)
    assert [*half.token_ids, *rest.token_ids] == whole.token_ids.tolist()


def test_slow_stretches_prefill_and_decode():
    """One engine of two is ten times slower: 20 s instead of 2."""

    async def main(index: int) -> float:
        script = ({"engine": 1, "do": "slow", "factor": 10},)
        engine = await started(index, prefill_tokens_per_s=200, decode_tokens_per_s=8, faults=script)
        await engine.generate(request(PROMPT, 8))
        return asyncio.get_running_loop().time()

    assert [run(main(0)), run(main(1))] == pytest.approx([2, 20])


def test_a_hung_call_stays_until_cancelled():
    """It is in flight and keeps its place in the batch; cancelling frees both."""

    async def main():
        engine = await started(decode_tokens_per_s=1, max_batch=1, faults=({"do": "hang", "at_call": 1},))
        hung = asyncio.create_task(engine.generate(request(PROMPT)))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(engine.generate(request(PROMPT)))
        await asyncio.sleep(10_000)
        assert (engine.in_flight(), hung.done(), waiting.done()) == (2, False, False)
        hung.cancel()
        await waiting
        assert engine.in_flight() == 0

    run(main())


async def dead_within(engine, call, seconds: float) -> Death:
    """The death, after making sure that the call is never answered."""
    task = asyncio.create_task(engine.generate(call))
    done, _ = await asyncio.wait([task], timeout=seconds)
    assert not done
    task.cancel()
    return engine.died.result()


def test_exit_by_call_resolves_died_and_answers_nobody():
    """The struck call, one already running and a later one stay unanswered; `died` has the reason, and says that it was
    no kill from outside."""

    async def main():
        engine = await started(decode_tokens_per_s=1, faults=({"do": "exit", "token": 5},))
        running = asyncio.create_task(engine.generate(request(PROMPT)))
        await asyncio.sleep(1)
        assert not engine.died.done()
        death = await dead_within(engine, request([5]), 100)
        assert "fault script" in death.reason
        assert (death.crashed, death.exit_code) == (True, ENGINE_DIED)
        await dead_within(engine, request(PROMPT), 100)
        assert not running.done()
        running.cancel()

    run(main())


def test_exit_by_the_clock_needs_no_call():
    """An idle engine dies at `at_s` after its start."""

    async def main():
        engine = await started(faults=({"do": "exit", "at_s": 30},))
        await engine.died
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(30)


def test_close_stops_the_clock_of_the_script():
    """A closed engine does not die any more."""

    async def main():
        engine = await started(faults=({"do": "exit", "at_s": 30},))
        await engine.close()
        await asyncio.sleep(100)
        return engine.died.done()

    assert not run(main())


@pytest.mark.parametrize(("trigger", "value"), [("at_call", 1), ("at_s", 0.01)])
def test_kill_ends_the_process_by_sigkill(trigger, value):
    """The process is gone without a word, as after the kernel's out-of-memory killer."""
    code = (
        "import asyncio, numpy as np\n"
        "from zagent.config import SimConfig\n"
        "from zagent.engine.base import GenerateRequest\n"
        "from zagent.engine.sim import build\n"
        "async def main():\n"
        f"    engine = build(sim=SimConfig(faults=({{'do': 'kill', '{trigger}': {value}}},)), name='e', index=0)\n"
        "    await engine.start()\n"
        + ("    await asyncio.sleep(30)\n" if trigger == "at_s" else "")
        + "    await engine.generate(GenerateRequest('r', np.array([1], np.int32)))\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=50)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")
