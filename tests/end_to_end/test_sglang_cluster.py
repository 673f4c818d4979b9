"""The main job on two real SGLang engines: exact, sticky, balanced; one of them killed; nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import zagent
from support.clusters import questions
from support.processes import eventually, running, with_run_id
from support.transformers_reference import Reference
from zagent.errors import MemberLost

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SUBJECTS = ("the sea", "bread", "a violin", "the moon", "rice", "a bridge", "winter", "a library")
TEMPERATURES = (1.0, 0.7)


def config(logs: Path, *more: str) -> zagent.Config:
    return zagent.Config.load(
        overrides=[
            f"logs.dir={logs}",
            "engine.count=2",
            "worker.count=1",
            "rollout.prompt_length=128",
            "rollout.response_length=24",
            "engine.checkpoint_tokens=4",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    """Two real engines on the CPU, float32."""
    with zagent.AgentLoopManager.launch(config(tmp_path_factory.mktemp("logs"))) as manager:
        yield manager


@pytest.fixture(scope="module")
def run(manager: zagent.AgentLoopManager) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """One event loop, with its link to the broker, for all tests that call engines directly."""
    with asyncio.Runner() as runner:
        runner.run(manager.server_manager.generate("first", [1], {"max_new_tokens": 1}))
        yield runner.run


@pytest.fixture(scope="module")
def reference(manager: zagent.AgentLoopManager) -> Reference:
    return Reference(manager.config.model.path)


def batch(count: int, **meta: Any) -> zagent.DataProto:
    made = questions(count, lambda i: f"Write one sentence about {SUBJECTS[i % len(SUBJECTS)]}, number {i}.")
    made.meta_info.update(meta)
    return made


def real_tokens(out: zagent.DataProto, row: int) -> tuple[list[int], list[int]]:
    """Prompt and response of a row without their padding."""
    mask = out.batch["attention_mask"][row].bool()
    width = out.batch["prompts"].shape[1]
    prompt = out.batch["prompts"][row][mask[:width]].tolist()
    return prompt, out.batch["responses"][row][mask[width:]].tolist()


def test_greedy_rows_equal_transformers(manager: zagent.AgentLoopManager, reference: Reference) -> None:
    """Validation rows are greedy: the first 16 tokens of five prompts are transformers' own."""
    out = manager.generate_sequences(batch(5, validate=True))
    for row in range(5):
        prompt, response = real_tokens(out, row)
        assert response[:16] == reference.greedy(prompt, 16)[: len(response)]
    assert out.batch["response_mask"].sum(dim=1).min() >= 8


def test_log_probs_of_a_batch_are_the_models(manager: zagent.AgentLoopManager, reference: Reference) -> None:
    """Through the whole pipeline, into the tensors: within 1e-3 of a float32 forward over the same ids, and far off
    when the ids are shifted by one. Both engines took part."""
    out = manager.generate_sequences(batch(16))
    assert out.meta_info["failed"] == 0
    worst, shifted = 0.0, 0.0
    for row in range(4):
        prompt, response = real_tokens(out, row)
        found = out.batch["rollout_log_probs"][row].numpy()[: len(response)]
        worst = max(worst, np.abs(found - reference.log_probs(prompt, response)).max())
        moved = reference.log_probs(prompt, response[1:] + response[:1])
        shifted = max(shifted, np.abs(found - moved).max())
    assert worst < 1e-3
    assert shifted > 1.0
    assert min(stats["calls"] for stats in manager.engine_stats().values()) >= 8


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_probs_at_a_temperature(
    manager: zagent.AgentLoopManager, run: Any, reference: Reference, temperature: float
) -> None:
    """The engine's log-probabilities are those of the tempered distribution."""
    prompt = [1, 2, 3, 500, 600]

    async def call() -> zagent.TokenOutput:
        params = {"max_new_tokens": 24, "temperature": temperature, "logprobs": True, "ignore_eos": True}
        return await manager.server_manager.generate("one", prompt, params)

    output = run(call())
    expected = reference.log_probs(prompt, list(output.token_ids), temperature)
    assert np.abs(np.array(output.log_probs) - expected).max() < 1e-3


async def cached_shares(manager: zagent.AgentLoopManager, sticky: bool) -> list[float]:
    """Two turns of seven sessions: the share of turn one's tokens that turn two finds in the prefix cache.

    Seven, and turn two one call after another: with two engines that take turns, a call without a session then meets
    the engine that does not know it.
    """
    llm, params = manager.server_manager, {"max_new_tokens": 16, "ignore_eos": True}
    starts = [[10 + number, *range(1000 + 97 * number, 1060 + 97 * number)] for number in range(7)]
    firsts = [await llm.generate(f"{sticky}{number}", start, params) for number, start in enumerate(starts)]
    shares = []
    for number, (start, first) in enumerate(zip(starts, firsts, strict=True)):
        history = start + list(first.token_ids)
        session = f"{sticky}{number}" if sticky else f"other{number}"
        again = await llm.generate(session, [*history, 42], params)
        shares.append(again.cached_tokens / (len(history) - 1))
    return shares


def test_sessions_stick_to_the_engine_that_knows_them(manager: zagent.AgentLoopManager, run: Any) -> None:
    """Turn two of every session finds at least 95 % of turn one in the prefix cache; without sessions, little."""
    manager.clear_kv_cache()
    assert min(run(cached_shares(manager, sticky=True))) >= 0.95
    manager.clear_kv_cache()
    scattered = run(cached_shares(manager, sticky=False))
    print(f"cached share of turn one without sessions: {np.mean(scattered):.0%}")
    assert max(scattered) < 0.5


def test_an_id_outside_the_vocabulary_harms_nobody(manager: zagent.AgentLoopManager, run: Any) -> None:
    """That call is refused; both engines live on."""

    async def call() -> None:
        with pytest.raises(zagent.InvalidRequest, match="outside the vocabulary"):
            await manager.server_manager.generate("bad", [1, 10**6], {"max_new_tokens": 4})

    run(call())
    assert {engine["state"] for engine in manager.status()["pools"]["engine"].values()} == {"ready"}


def engine_0(manager: zagent.AgentLoopManager) -> dict[str, Any]:
    found: dict[str, Any] = manager.status()["pools"]["engine"]["engine-0"]
    return found


def sampled_tokens(manager: zagent.AgentLoopManager) -> int:
    """What the engines that live have answered with."""
    return sum(stats["response_tokens"] for stats in manager.engine_stats().values())


def kill_scheduler(pid: int) -> float:
    """SIGKILL of an engine's scheduler; when it was."""
    scheduler = next(p for p in psutil.Process(pid).children() if "scheduler" in " ".join(p.cmdline()))
    os.kill(scheduler.pid, signal.SIGKILL)
    return time.monotonic()


async def cut_off(manager: zagent.AgentLoopManager, rows: int) -> tuple[list[zagent.Outcome], dict[str, float]]:
    """Outcomes of ``rows`` rows while the scheduler of engine-0 is killed in the middle of at least eight of them; and
    seconds from then until a caller knew of the loss, the broker knew, the engine's process was gone, all was done.

    A call of our own on that engine tells how far its rows are: they decode with it, in step.
    """
    calls, pieces = await manager.server_manager._table(), []
    argument = [np.arange(10, 20, dtype=np.int32), {"max_new_tokens": 1000, "ignore_eos": True}, None, None]
    call = asyncio.ensure_future(
        calls.call("engine", "generate", argument, member="engine-0", on_progress=pieces.append)
    )
    outcomes = asyncio.ensure_future(asyncio.to_thread(lambda: list(manager.stream(batch(rows)))))
    await until(lambda: engine_0(manager)["in_flight"] >= 9)
    seen = len(pieces)
    await until(lambda: len(pieces) >= seen + 4)
    victim = engine_0(manager)
    assert victim["in_flight"] >= 9
    killed = kill_scheduler(victim["pid"])
    with pytest.raises(MemberLost) as lost:
        await call
    seconds = {"to the caller": time.monotonic() - killed}
    assert not lost.value.crashed
    await until(lambda: (engine_0(manager)["state"], engine_0(manager)["epoch"]) != ("ready", 1))
    seconds["to the broker"] = time.monotonic() - killed
    await until(lambda: not running(victim["pid"]))
    seconds["to its end"] = time.monotonic() - killed
    found = await outcomes
    return found, {**seconds, "until all rows were done": time.monotonic() - killed}


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - other processes have no event for it
            await asyncio.sleep(0.01)


def test_an_engine_whose_scheduler_is_killed_costs_no_row(
    manager: zagent.AgentLoopManager, run: Any, reference: Reference
) -> None:
    """kill -9 of one scheduler while at least eight rows run there: the loss is known within 1.5 s, every row is ok,
    those that were cut go on from the tokens they had (with the model's own log-probabilities throughout), and the
    engine is back and serves. Afterwards closing leaves no process and no shared memory. (Last: it closes the cluster.)
    """
    before = sampled_tokens(manager) - manager.engine_stats()["engine-0"]["response_tokens"]
    outcomes, seconds = run(cut_off(manager, 24))
    began = time.monotonic() - seconds["until all rows were done"]
    print("scheduler killed:", ", ".join(f"{time:.2f} s {what}" for what, time in seconds.items()))
    assert max(seconds["to the caller"], seconds["to the broker"]) < 1.5
    assert seconds["to its end"] < 3
    assert [outcome.error for outcome in outcomes if outcome.status != "ok"] == []
    assert len(outcomes) == 24

    outputs = [outcome.output for outcome in outcomes if outcome.output is not None]
    for output in outputs:
        prompt, response = list(output.prompt_ids), list(output.response_ids)
        assert np.abs(np.asarray(output.response_logprobs) - reference.log_probs(prompt, response)).max() < 1e-3
    kept = sum(len(output.response_ids) for output in outputs) - (sampled_tokens(manager) - before)
    print(f"tokens of the killed engine's that were not sampled again: {kept}")
    assert kept >= 8 * 4

    eventually(lambda: (engine_0(manager)["state"], engine_0(manager)["epoch"]) == ("ready", 2), 180)
    print(f"engine back after {time.monotonic() - began:.0f} s")
    assert manager.generate_sequences(batch(16)).meta_info["failed"] == 0
    assert manager.engine_stats()["engine-0"]["calls"] >= 4

    run_id = manager.run_id
    manager.close()
    eventually(lambda: not with_run_id(run_id), 5)
    assert [path for path in os.listdir("/dev/shm") if run_id in path] == []
