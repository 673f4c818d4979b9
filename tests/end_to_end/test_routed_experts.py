"""Routed experts from simulated engines to the trainer's tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import zagent
from support import two_turns
from support.clusters import questions, sim_config
from zagent.engine.sim.experts import ExpertRouter

LAYERS, EXPERTS, PER_TOKEN, SEED = 3, 20, 4, 11
P, R = 128, 32
ROWS = 24
#: This row's prompt is longer than P.
TOO_LONG = 5


def config(tmp_path: Path, *more: str) -> zagent.Config:
    return sim_config(
        tmp_path,
        "worker.count=2",
        f"rollout.imports=[{two_turns.__name__}]",
        "rollout.max_failed_fraction=0.1",
        f"engine.sim.seed={SEED}",
        "engine.sim.eos_probability=0.05",
        "engine.sim.eos_token_id=258",
        *more,
    )


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> zagent.DataProto:
    """Rows of one turn and of two, one of which fails, over two engines and two workers."""
    routing = (f"moe_layers={LAYERS}", f"experts={EXPERTS}", f"experts_per_token={PER_TOKEN}")
    overrides = [f"engine.sim.{key}" for key in routing]
    agents = ["single_turn_agent" if i % 2 else "two_turns" for i in range(ROWS)]
    given = questions(ROWS, lambda i: "?" * (200 if i == TOO_LONG else i + 1), agent_name=agents)
    with zagent.AgentLoopManager.launch(config(tmp_path_factory.mktemp("moe"), *overrides)) as manager:
        found = manager.generate_sequences(given)
        used = [engine["total"] for engine in manager.status()["pools"]["engine"].values()]
    assert len(used) == 2
    assert all(used)
    return found


def test_the_tensor_has_the_engines_dtype_and_the_contracts_shape(batch: zagent.DataProto) -> None:
    """[B, P+R, layers, experts per token], int16 as simulated engines send them."""
    routed = batch.batch["routed_experts"]
    assert routed.shape == (ROWS, P + R, LAYERS, PER_TOKEN)
    assert routed.dtype == torch.int16


def test_every_row_has_the_experts_of_its_final_ids(batch: zagent.DataProto) -> None:
    """However many calls made it: up to the last sampled token what its ids give at once, and zeros elsewhere."""
    router = ExpertRouter(LAYERS, EXPERTS, PER_TOKEN, SEED)
    lengths = set()
    for i in set(range(ROWS)) - {TOO_LONG}:
        real = batch.batch["attention_mask"][i].numpy() == 1
        start = int(real.argmax())
        last_sampled = P + int(batch.batch["response_mask"][i].nonzero().max())
        expected = np.zeros((P + R, LAYERS, PER_TOKEN), np.int16)
        ids = batch.batch["input_ids"][i].numpy()[start:last_sampled]
        expected[start:last_sampled] = router.routed(ids)
        assert (batch.batch["routed_experts"][i].numpy() == expected).all(), i
        assert expected[start:last_sampled].any(axis=(1, 2)).all()
        lengths.add(last_sampled - P)
    assert len(lengths) > 3


def test_rows_of_two_turns_are_covered_across_them(batch: zagent.DataProto) -> None:
    """Inserted tokens between two calls have experts, those after the last call have none, and are real tokens."""
    for i in range(0, ROWS, 2):
        mask = batch.batch["response_mask"][i]
        routed = batch.batch["routed_experts"][i, P:].any(dim=(-1)).any(dim=-1)
        turns = "".join(map(str, mask.tolist())).strip("0").split("0" * len(two_turns.TURNS[0][1]))
        assert len(turns) == 2
        last = int(mask.nonzero().max())
        assert routed[:last].all()
        assert not routed[last:].any()
        assert int(batch.batch["attention_mask"][i, P:].sum()) == last + 1 + len(two_turns.TURNS[1][1])


def test_a_failed_row_has_zeros(batch: zagent.DataProto) -> None:
    """Beside rows that have experts."""
    assert "PromptTooLong" in batch.non_tensor_batch["error"][TOO_LONG]
    assert not batch.batch["routed_experts"][TOO_LONG].any()


def test_a_dense_model_has_no_such_tensor(tmp_path: Path) -> None:
    """Nothing is invented where no layers were asked for."""
    with zagent.AgentLoopManager.launch(config(tmp_path)) as manager:
        assert "routed_experts" not in manager.generate_sequences(questions(2)).batch
