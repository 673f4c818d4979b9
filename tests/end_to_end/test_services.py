"""Services on real processes and sockets: called, killed, started again, given up; nothing left."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import zagent
from support.clusters import model_directory, questions, sim_config
from support.processes import eventually, running, with_run_id
from support.transformers_reference import Reference
from zagent.errors import ConfigError, DeadlineExceeded, MemberLost, PoolLost, StartupError
from zagent.loops.tokenizer import load_tokenizer

BOX = "services.box.target=support.actors.Worker"
FAST = "launcher.restart_wait_s=0.05"


def with_cluster(tmp_path: Path, test: Callable[[zagent.AgentLoopManager], Awaitable[None]], *more: str) -> None:
    """Run ``test``; afterwards the broker holds nothing, and no process is left."""
    config = sim_config(tmp_path, "engine.count=1", FAST, *more)
    with zagent.AgentLoopManager.launch(config) as manager:
        manager.wait_until_started()
        asyncio.run(test(manager))
        eventually(lambda: quiet(manager))
    assert with_run_id(manager.run_id) == []


def quiet(manager: zagent.AgentLoopManager) -> bool:
    status = manager.status()
    return status["pending"] == 0 and not any(
        m["in_flight"] for pool in status["pools"].values() for m in pool.values()
    )


def pool_of(manager: zagent.AgentLoopManager, pool: str = "box") -> dict[str, Any]:
    found: dict[str, Any] = manager.status()["pools"][pool]
    return found


async def members(manager: zagent.AgentLoopManager, pool: str = "box") -> dict[str, Any]:
    return await asyncio.to_thread(pool_of, manager, pool)


async def until(holds: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(eventually, holds)


def noted(path: Path) -> list[int]:
    """Pids in the file, one per line that is complete."""
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_loops_run_code_in_a_sandbox(tmp_path: Path) -> None:
    """The example: rows of one batch, on two sandboxes; one row's code wants too much memory, its siblings go on."""
    config = sim_config(
        tmp_path,
        "services.sandbox.target=examples.services.sandbox.Sandbox",
        "services.sandbox.count=2",
        "services.sandbox.args.memory_mb=256",
        "rollout.agent=support.service_loops.Calculates",
    )
    codes = [f"print({i} * 7)" for i in range(12)]
    codes[5] = "x = bytearray(2**30); print(1)"
    with zagent.AgentLoopManager.launch(config) as manager:
        out = manager.generate_sequences(questions(len(codes), codes.__getitem__))
        totals = [member["total"] for member in manager.status()["pools"]["sandbox"].values()]
    scores = out.batch["rm_scores"].sum(dim=1).tolist()
    assert scores == [-1.0 if i == 5 else 7.0 * i for i in range(12)]
    assert list(out.non_tensor_batch["exit_status"]) == [1 if i == 5 else 0 for i in range(12)]
    assert sorted(totals) == [6, 6]


def test_the_sandbox_kills_what_runs_too_long_or_is_left(tmp_path: Path) -> None:
    """By the wall clock, and with all of its processes; what it said by then is kept."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        sandbox = manager.services["sandbox"]
        pids = tmp_path / "pids"
        fork = f"""
import os, time
if os.fork() == 0:
    open({str(pids)!r}, "w").write(str(os.getpid()) + "\\n")
    time.sleep(600)
print("begun", flush=True)
"""
        done = await sandbox.run(fork + "time.sleep(600)", limit=1.5)
        assert (done["stdout"], done["exit_status"], done["timed_out"]) == ("begun\n", -9, True)
        await until(lambda: noted(pids) and not running(noted(pids)[0]))
        pids.unlink()
        done = await sandbox.run(fork, limit=30)
        assert (done["stdout"], done["exit_status"], done["timed_out"]) == ("begun\n", 0, False)
        await until(lambda: not pids.exists() or (noted(pids) and not running(noted(pids)[0])))
        done = await sandbox.run("import sys; print('oh', file=sys.stderr); sys.exit(5)")
        assert (done["stderr"], done["exit_status"]) == ("oh\n", 5)
        task = asyncio.ensure_future(sandbox.run(fork + "time.sleep(600)", limit=600))
        pids.unlink(missing_ok=True)
        await until(lambda: noted(pids))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not running(noted(pids)[0]))

    with_cluster(tmp_path, test, "services.sandbox.target=examples.services.sandbox.Sandbox")


def test_a_rows_calls_go_to_one_process(tmp_path: Path) -> None:
    """Its session is sticky; all rows together use both processes."""
    more = [BOX, "services.box.count=2", "rollout.agent=support.service_loops.AsksTwice"]
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *more)) as manager:
        out = manager.generate_sequences(questions(16))
        assert manager.status()["sessions"] == 0
    pairs = [tuple(pids) for pids in out.non_tensor_batch["pids"]]
    assert all(first == second for first, second in pairs)
    assert len(set(pairs)) == 2


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    """Mid-call: an idempotent method's caller gets its answer from the next life, the other hears `MemberLost`; the
    member is back with epoch 2 (pitfalls K1, K5)."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        box, again, once = manager.services["box"], tmp_path / "again", tmp_path / "once"
        calls = [box.begin_again(str(again), 1.0), box.begin(str(once), 60.0)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        (first,) = set(await until(lambda: noted(again) and noted(once)))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(MemberLost, match=r"box-0 is gone"):
            await tasks[1]
        second = await tasks[0]
        assert noted(again) == [first, second]
        assert noted(once) == [first]
        member = (await members(manager))["box-0"]
        assert (member["state"], member["epoch"], member["restarts"], member["pid"]) == ("ready", 2, 1, second)
        assert await box.pid() == second

    with_cluster(tmp_path, test, BOX)


def test_all_processes_killed_at_once_come_back(tmp_path: Path) -> None:
    """Calls wait meanwhile, and are served."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        before = [member["pid"] for member in (await members(manager)).values()]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: all(m["state"] == "dead" or m["epoch"] == 2 for m in pool_of(manager).values()))
        pids = await asyncio.gather(*(manager.services["box"].pid() for _ in range(8)))
        assert set(pids).isdisjoint(before)

    with_cluster(tmp_path, test, BOX, "services.box.count=2")


def test_a_service_that_is_broken_for_good_does_not_end_the_run(tmp_path: Path) -> None:
    """Once its restarts are used up its calls fail with its last output, waiting ones and later ones; other services
    and the rows go on (pitfall K9)."""
    crash = tmp_path / "crash"

    async def test(manager: zagent.AgentLoopManager) -> None:
        crash.touch()
        os.kill((await members(manager))["box-0"]["pid"], signal.SIGKILL)
        await until(lambda: manager.status()["pools"]["box"]["box-0"]["state"] == "dead")
        for _ in range(2):
            with pytest.raises(PoolLost, match=r"no box is left, after 2 restarts: it exited with code 9(?s:.*)cheese"):
                await manager.services["box"].pid()
        assert await manager.services["other"].env("CUDA_VISIBLE_DEVICES") == "7"
        assert (await manager.generate_sequences_async(questions(2))).meta_info["failed"] == 0

    other = ["services.other.target=support.actors.Worker", "services.other.env.CUDA_VISIBLE_DEVICES=7"]
    with_cluster(tmp_path, test, BOX, f"services.box.args.crash={crash}", "launcher.max_restarts=2", *other)


BROKEN = {
    "Nobody": (ConfigError, r"services\.box\.target='support\.actors\.Nobody' cannot be imported"),
    "a_function": (ConfigError, r"services\.box\.target=.* is a function, not a class"),
    "Everything": (ConfigError, r"services\.box\.args: Everything: .*'x'"),
    "Unstartable": (StartupError, r"box-0 did not become ready: .*raised OSError: cannot reach the database"),
    "Refuses": (StartupError, r"services\.box: Refuses\(\) raised .*licence: 7"),
    "NeverReady": (StartupError, r"box-0 did not become ready: it said nothing within 15 s"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_service_that_cannot_start_fails_the_start(tmp_path: Path, name: str) -> None:
    """It names the service and the reason; nothing is left."""
    error, message = BROKEN[name]
    box = [f"services.box.target=support.actors.{name}", *(["services.box.args.x=1"] if name == "Everything" else [])]
    limit = "launcher.start_timeout_s=15" if name == "NeverReady" else "launcher.start_timeout_s=100"
    with pytest.raises(error, match=message):
        zagent.AgentLoopManager.launch(sim_config(tmp_path, "engine.count=1", limit, *box))


def test_ten_times_the_load_is_served(tmp_path: Path) -> None:
    """No process has more than its `max_in_flight`; the rest waits in the broker."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        box = manager.services["box"]
        tasks = [asyncio.ensure_future(box.begin(str(tmp_path / "begun"), 0.05)) for _ in range(80)]
        seen = []
        while not all(task.done() for task in tasks):
            seen += [member["in_flight"] for member in (await members(manager)).values()]
        assert len(await asyncio.gather(*tasks)) == 80
        assert max(seen) == 4
        assert len(noted(tmp_path / "begun")) == 80

    with_cluster(tmp_path, test, BOX, "services.box.count=2", "services.box.max_in_flight=4")


def test_a_cancelled_thread_keeps_its_place(tmp_path: Path) -> None:
    """Nothing can end it: the broker counts it until it has ended, and the caller does not wait."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        box = manager.services["box"]
        with pytest.raises(DeadlineExceeded):
            await box.bind(timeout=1.0).block(str(tmp_path / "begun"), 3.0)
        assert (await members(manager))["box-0"]["in_flight"] == 1
        assert await box.pid() > 0  # waits for the place
        assert (await members(manager))["box-0"]["in_flight"] == 0

    with_cluster(tmp_path, test, BOX, "services.box.max_in_flight=1")


def test_lifecycle_and_own_calls(tmp_path: Path) -> None:
    """`start` before the first call, `close` at the end; a service may call other services, in `start` too."""
    life = tmp_path / "life"

    async def test(manager: zagent.AgentLoopManager) -> None:
        assert life.read_text().split() == ["made", "started"]
        first, reply = await manager.services["front"].ask()
        assert (first, type(reply)) == (21, str)

    with_cluster(
        tmp_path,
        test,
        "services.living.target=support.actors.Living",
        f"services.living.args.path={life}",
        "services.front.target=support.actors.Front",
        "services.back.target=support.actors.Everything",
        f"services.judge.model.path={model_directory(tmp_path / 'judge')}",
        "services.judge.engine.kind=sim",
    )
    assert life.read_text().split() == ["made", "started", "closing", "closed"]


def test_a_judge_is_a_pool_of_its_own(tmp_path: Path) -> None:
    """Its engines answer in text and in tokens, are not the policy's, and come back when killed."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        judge, ask = manager.services["judge"], [{"role": "user", "content": "Good?"}]
        answer = await judge.chat(ask, {"max_new_tokens": 4, "sampling_seed": 1})
        assert len((await judge.generate("s", [1, 2], {"max_new_tokens": 5})).token_ids) == 5
        assert manager.engine_stats()["engine-0"]["calls"] == 0
        os.kill((await members(manager, "judge"))["judge-0"]["pid"], signal.SIGKILL)
        assert await judge.chat(ask, {"max_new_tokens": 4, "sampling_seed": 1}) == answer

    judge = [f"services.judge.model.path={model_directory(tmp_path / 'judge')}", "services.judge.engine.kind=sim"]
    with_cluster(tmp_path, test, *judge)


def test_a_reward_function_asks_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example: each row is scored by what the judge replied."""
    config = sim_config(
        tmp_path,
        f"services.judge.model.path={model_directory(tmp_path / 'judge')}",
        "services.judge.engine.kind=sim",
        "reward.function=examples.services.judge.judged",
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        batch = questions(4, data_source=["x"] * 4, reward_model=[{"ground_truth": "7"}] * 4)
        out = manager.generate_sequences(batch)
        judged = manager.status()["pools"]["judge"]["judge-0"]["total"]
    assert judged == 4
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    grade = importlib.import_module("examples.services.judge").grade
    assert [grade(text) for text in ("8", "Grade: 10.", "none", "11", "7/10")] == [0.8, 1.0, 0.0, 0.0, 0.7]
    replies = [str(reply) for reply in out.non_tensor_batch["judge_reply"]]
    assert out.batch["rm_scores"].sum(dim=1).tolist() == pytest.approx([grade(reply) for reply in replies])


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_a_judge_on_real_sglang(tmp_path: Path) -> None:
    """Beside simulated policy engines, with a model of its own: its greedy answers, through template and tokenizer, are
    transformers' own."""

    async def test(manager: zagent.AgentLoopManager) -> None:
        path = manager.config.services["judge"].model.path  # type: ignore[union-attr]
        reference, tokenizer = Reference(path), load_tokenizer(path)
        for question in ("What is 12 + 30?", "Hello!", "What is 7 times 6?"):
            messages = [{"role": "user", "content": question}]
            answer = await manager.services["judge"].chat(messages, {"max_new_tokens": 12, "temperature": 0})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = reference.greedy(prompt, 12)
            end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            assert answer == tokenizer.decode(ids[:end], skip_special_tokens=True)
        assert (await members(manager, "judge"))["judge-0"]["total"] == 3
        assert manager.engine_stats()["engine-0"]["calls"] == 0

    with_cluster(tmp_path, test, "services.judge.model.path=tiny")
