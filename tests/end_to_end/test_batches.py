"""Whole batches on real processes: the same tensors whatever the number of workers and engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from support.clusters import questions, sim_config

#: What may differ from run to run: how long it took and what happened to be cached.
VARYING = ("cached_tokens",)


def rows(count: int) -> zagent.DataProto:
    """Every prompt twice where there are several rows, named by uid."""
    uids = [f"q{i // 2}" for i in range(count)]
    return questions(count, lambda i: f"What is {i // 2} plus one?", uid=uids, index=list(range(count)))


def run(tmp_path: Path, workers: int, engines: int, sizes: tuple[int, ...]) -> list[zagent.DataProto]:
    config = sim_config(
        tmp_path,
        f"worker.count={workers}",
        f"engine.count={engines}",
        "engine.sim.decode_tokens_per_s=3000",
        "engine.sim.eos_probability=0.05",
        "engine.sim.eos_token_id=258",
        "engine.sim.faults=[{engine: '*', every: 3, do: slow, factor: 7}]",
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        return [manager.generate_sequences(rows(size)) for size in sizes]


SIZES = (0, 1, 2, 61)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[zagent.DataProto]:
    """One worker, one engine."""
    return run(tmp_path_factory.mktemp("one"), 1, 1, SIZES)


@pytest.mark.parametrize(("workers", "engines"), [(1, 3), (2, 2), (8, 3)])
def test_tensors_do_not_depend_on_placement(
    tmp_path: Path, expected: list[zagent.DataProto], workers: int, engines: int
) -> None:
    """0, 1, 2 and 61 rows: identical tensors and non-tensors with any number of workers and engines."""
    for one, other in zip(expected, run(tmp_path, workers, engines, SIZES), strict=True):
        assert list(one.batch) == list(other.batch)
        assert all(one.batch[key].equal(other.batch[key]) for key in one.batch)
        assert set(one.non_tensor_batch) == set(other.non_tensor_batch)
        for key in set(one.non_tensor_batch) - set(VARYING):
            assert plain(one.non_tensor_batch[key]) == plain(other.non_tensor_batch[key]), key


def plain(column: np.ndarray) -> list[Any]:
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in column]


def test_shapes_and_samples(expected: list[zagent.DataProto]) -> None:
    """Widths are P and R for every batch size, order is kept, and samples of one prompt differ."""
    for out, size in zip(expected, SIZES, strict=True):
        assert out.batch["input_ids"].shape == (size, 128 + 32)
    out = expected[-1]
    assert list(out.non_tensor_batch["index"]) == list(range(61))
    responses = {tuple(row) for row in out.batch["responses"].tolist()}
    assert len(responses) == 61
    assert out.batch["prompts"][0].equal(out.batch["prompts"][1])
    assert 0 < out.batch["response_mask"].sum() < 61 * 32  # some end early, and what follows is masked


def test_more_rows_than_the_broker_queues(tmp_path: Path) -> None:
    """Ten times the capacity of everything: all finish, in order."""
    config = sim_config(tmp_path, "broker.max_pending=16", "worker.max_in_flight=8", "engine.max_in_flight=4")
    with zagent.AgentLoopManager.launch(config) as manager:
        out = manager.generate_sequences(questions(400))
    assert [text is None for text in out.non_tensor_batch["error"]] == [True] * 400


def test_stream_gives_outcomes_as_they_come_and_closing_it_cancels_the_rest(tmp_path: Path) -> None:
    """The first outcome is there long before the last; after close nothing runs in workers and engines."""
    config = sim_config(tmp_path, "engine.sim.decode_tokens_per_s=50", "engine.sim.max_batch=1")
    with zagent.AgentLoopManager.launch(config) as manager:
        stream = manager.stream(questions(40))
        first = next(stream)
        assert (first.status, len(first.output.response_ids), first.attempt) == ("ok", 32, 1)
        stream.close()
        pools = manager.status()["pools"]
        assert {m["in_flight"] for m in pools["worker"].values()} | {
            m["in_flight"] for m in pools["engine"].values()
        } <= {
            0,
            *range(40),
        }
        out = manager.generate_sequences(questions(1))
        assert out.meta_info["failed"] == 0
        assert sum(stats["calls"] for stats in manager.engine_stats().values()) < 20


def test_from_inside_an_event_loop(tmp_path: Path) -> None:
    """create, generate_sequences_async, stream_async, and the synchronous call, all inside one running loop."""

    async def inside() -> None:
        manager = await zagent.AgentLoopManager.create(sim_config(tmp_path))
        try:
            out = await manager.generate_sequences_async(questions(3))
            assert len(out) == 3
            outcomes = [outcome async for outcome in manager.stream_async(questions(5))]
            assert sorted(outcome.index for outcome in outcomes) == list(range(5))
            assert manager.generate_sequences(questions(3)).batch["responses"].equal(out.batch["responses"])
            answers = await asyncio.gather(*(manager.server_manager.generate(f"{i}", [1, i], {}) for i in range(100)))
            assert len(answers) == 100
        finally:
            manager.close()

    asyncio.run(inside())


def test_validation_is_greedy_and_versions_are_stamped(tmp_path: Path) -> None:
    """meta_info.validate takes val_kwargs: both samples of a prompt are the same; sampled tokens carry version 0."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path)) as manager:
        batch = rows(2)
        batch.meta_info["validate"] = True
        out = manager.generate_sequences(batch)
    assert out.batch["responses"][0].equal(out.batch["responses"][1])
    assert set(out.batch["rollout_versions"].flatten().tolist()) == {0}
    assert list(out.non_tensor_batch["min_global_steps"]) == [0, 0]


def test_connect_joins_a_cluster_by_its_endpoint(tmp_path: Path) -> None:
    """A second manager needs only the endpoint; closing it leaves the cluster alone."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path)) as manager:
        with zagent.AgentLoopManager.connect(manager.endpoint) as other:
            assert other.config == manager.config
            there = other.generate_sequences(questions(2))
        assert manager.generate_sequences(questions(2)).batch["responses"].equal(there.batch["responses"])
        manager.clear_kv_cache()


def test_drain_and_remove_while_running(tmp_path: Path) -> None:
    """A drained engine finishes what it has and gets nothing new; a removed one's calls run again elsewhere."""
    config = sim_config(tmp_path, "engine.count=3", "engine.sim.decode_tokens_per_s=100")
    with zagent.AgentLoopManager.launch(config) as manager:
        stream = manager.stream(questions(60))
        outcomes = [next(stream)]
        manager.drain("engine-0")
        before = manager.status()["pools"]["engine"]["engine-0"]["total"]
        manager.remove("engine-1")
        outcomes += list(stream)
        engines = manager.status()["pools"]["engine"]
        assert {outcome.status for outcome in outcomes} == {"ok"}
        assert len(outcomes) == 60
        assert (engines["engine-0"]["state"], engines["engine-0"]["total"]) == ("draining", before)
        assert (engines["engine-1"]["state"], engines["engine-1"]["in_flight"]) == ("dead", 0)
