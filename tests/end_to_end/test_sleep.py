"""Engines that sleep: the order of things through a manager, on simulated engines, which release nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zagent
from zagent.trainer.checkpoint import forms

OPTIONS = (
    *("engine.kind=sim", "model.path=tiny", "engine.count=2", "worker.count=1", "engine.mode=hybrid"),
    *("rollout.prompt_length=64", "rollout.response_length=16"),
)


@pytest.fixture(scope="module")
def manager() -> Iterator[zagent.AgentLoopManager]:
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=list(OPTIONS))) as made:
        yield made


def rows() -> zagent.DataProto:
    return zagent.DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "1 plus 1?"}]] * 4})


def weights(manager: zagent.AgentLoopManager) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(form.shape) for name, form in forms(Path(manager.config.model.path)).items()}


def test_the_whole_cycle(manager: zagent.AgentLoopManager) -> None:
    """Asleep, weights back, updated, KV back: only then do calls pass, on the new weights."""
    assert manager.sleep() == {name: {"weights": 0, "kv_cache": 0} for name in ("engine-0", "engine-1")}
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up(["weights"])
    before = manager.version
    manager.update_weights(weights(manager))
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up(["kv_cache"])
    assert manager.status()["gated"] == []
    out = manager.generate_sequences(rows())
    assert set(out.batch["rollout_versions"][out.batch["response_mask"] == 1].tolist()) == {before + 1}


def test_weights_that_were_lost_are_waited_for(manager: zagent.AgentLoopManager) -> None:
    """All memory is back, but calls pass only after the update."""
    manager.sleep(2)
    manager.wake_up()
    assert manager.status()["gated"] == ["engine"]
    manager.update_weights(weights(manager))
    assert manager.status()["gated"] == []
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0


def test_kv_alone_comes_back_by_itself(manager: zagent.AgentLoopManager) -> None:
    """Level 1 leaves the weights where they are."""
    manager.sleep(1)
    with pytest.raises(zagent.StateError, match="sleeps already"):
        manager.sleep(1)
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up()
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0


def test_a_wrong_order_is_an_error_and_changes_nothing(manager: zagent.AgentLoopManager) -> None:
    """The engines live, and serve."""
    with pytest.raises(zagent.StateError, match="not released"):
        manager.wake_up(["kv_cache"])
    with pytest.raises(zagent.StateError, match="levels"):
        manager.sleep(7)
    assert manager.status()["gated"] == []
    manager.sleep(2)
    with pytest.raises(zagent.StateError, match="weights are released"):
        manager.update_weights(weights(manager))
    manager.wake_up()
    manager.update_weights(weights(manager))
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0
    assert {m["restarts"] for m in manager.status()["pools"]["engine"].values()} == {0}
