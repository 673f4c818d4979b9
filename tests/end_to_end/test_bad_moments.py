"""Closing, cancelling and dying at bad moments, on real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import zagent
from support.clusters import questions, sim_config, sim_overrides
from support.processes import Popen, eventually, with_run_id

#: Rows that take minutes: nothing here waits for one to end.
SLOW = ("engine.sim.decode_tokens_per_s=0.1", "engine.count=1")


def busy(manager: zagent.AgentLoopManager, rows: int) -> None:
    """Until ``rows`` calls are at the engines."""
    eventually(lambda: sum(e["in_flight"] for e in manager.status()["pools"]["engine"].values()) == rows)


def test_a_connected_trainer_hears_that_the_cluster_is_gone(tmp_path: Path) -> None:
    """kill -9 of the launcher that somebody else started: rows fail with the reason, nothing waits for ever."""
    command = [sys.executable, "-m", "zagent.launch", *sim_overrides(tmp_path, *SLOW)]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().split()[3]
        with zagent.AgentLoopManager.connect(endpoint) as manager:
            found: list[zagent.Outcome] = []
            waiting = threading.Thread(target=lambda: found.extend(manager.stream(questions(4))))
            waiting.start()
            busy(manager, 4)
            server.kill()
            waiting.join(20)
            assert {(o.status, type(o.error)) for o in found} == {("failed", zagent.ConnectionLost)}
            assert "launcher has ended" in str(found[0].error)
            eventually(lambda: not with_run_id(manager.run_id), 5)


def test_the_reason_of_the_end_reaches_the_rows(tmp_path: Path) -> None:
    """The only engine is killed for good: the rows' errors say so, and quote its log's place."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *SLOW, "launcher.max_restarts=0")) as manager:
        outcomes: list[zagent.Outcome] = []
        waiting = threading.Thread(target=lambda: outcomes.extend(manager.stream(questions(3))))
        waiting.start()
        busy(manager, 3)
        os.kill(manager.status()["pools"]["engine"]["engine-0"]["pid"], signal.SIGKILL)
        waiting.join(20)
        assert len(outcomes) == 3
        assert all("engine-0" in str(o.error) and "no engine is left" in str(o.error) for o in outcomes)


def test_close_from_another_thread_wakes_who_waits(tmp_path: Path) -> None:
    """generate_sequences raises with every row's outcome instead of waiting on a closed manager."""
    manager = zagent.AgentLoopManager.launch(sim_config(tmp_path, *SLOW))
    errors: list[zagent.RolloutError] = []

    def work() -> None:
        with pytest.raises((zagent.RolloutError, zagent.ConnectionLost)) as caught:
            manager.generate_sequences(questions(3))
        errors.append(caught.value)

    waiting = threading.Thread(target=work)
    waiting.start()
    busy(manager, 3)
    manager.close()
    waiting.join(20)
    assert len(errors) == 1
    assert "closed" in str(errors[0])


def test_a_dropped_stream_cancels_its_rows(tmp_path: Path) -> None:
    """An iterator that is only forgotten is closed by the garbage collector, and one never begun starts nothing."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *SLOW, "rollout.response_length=1")) as manager:
        manager.stream(questions(5))
        stream = manager.stream(questions(4))
        assert next(stream).status == "ok"
        del stream
        gc.collect()
        busy(manager, 0)
        assert manager.status()["pools"]["engine"]["engine-0"]["total"] <= 4


def test_create_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """What was being launched is closed once it is there."""

    async def cancelled() -> None:
        creating = asyncio.create_task(zagent.AgentLoopManager.create(sim_config(tmp_path)))
        await asyncio.sleep(0.3)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    asyncio.run(cancelled())
    eventually(lambda: not any(thread.name == "zagent-launch" for thread in threading.enumerate()))
    eventually(lambda: not launchers())


def launchers() -> list[str]:
    """Launchers that this process has started."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in pids if "zagent.launch" in Path(f"/proc/{pid}/cmdline").read_text()]
