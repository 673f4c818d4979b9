"""verl 0.9.1 itself, in an environment without sglang and with its own transformers: its `DataProto`, configuration,
reward manager and agent loops; real SGLang engines come from zagent's environment."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
import verl
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.reward import extract_reward
from verl.utils.import_utils import load_class_from_fqn

import zagent
from support.processes import eventually
from support.transformers_reference import Reference
from zagent.demo.questions import batch_of
from zagent.errors import ConfigError, InputError
from zagent.models import PACKAGED
from zagent.tiny.arithmetic import questions

MANAGER = "zagent.adapters.verl.AgentLoopManager"
LOOPS = Path(__file__).parents[1] / "verl"
#: zagent's environment, where sglang is.
ENGINES = Path(os.environ.get("ZAGENT_TEST_ENGINES", Path(__file__).parents[3] / ".venv/bin/python"))
VERLS_OWN = "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"
TINY = str(PACKAGED["tiny"])
PROMPT, RESPONSE = 128, 48


@pytest.fixture(scope="module", autouse=True)
def loops_are_found() -> Iterator[None]:
    """Beside the trainer's script, as a user has them."""
    sys.path.append(str(LOOPS))
    yield
    sys.path.remove(str(LOOPS))


def config_of(logs: Path, *overrides: str) -> Any:
    """verl's own configuration of a PPO trainer, with a section for zagent."""
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = hydra.compose(
            "ppo_trainer",
            [
                *(f"actor_rollout_ref.model.path={TINY}", "actor_rollout_ref.rollout.name=sglang"),
                *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"),
                *("actor_rollout_ref.rollout.agent.num_workers=1", "actor_rollout_ref.rollout.temperature=0.7"),
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
                f"+zagent.logs.dir={logs}",
                *overrides,
            ],
        )
    OmegaConf.resolve(config)
    return config


def batch(count: int = 3, agent: str | None = None) -> DataProto:
    """What the trainer takes from its data loader."""
    columns = dict(batch_of(questions(3, count), "row").non_tensor_batch)
    columns["extra_info"] = np.array([{"index": i} for i in range(count)], object)
    if agent is not None:
        columns["agent_name"] = np.array([agent] * count, object)
    return DataProto.from_dict(tensors={"dummy_tensor": torch.zeros(count, 1)}, non_tensors=columns)


def created(config: Any, **more: Any) -> Any:
    """As verl's trainer makes it."""
    manager_class = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "manager")
    return manager_class.create(config=config, llm_client=None, teacher_client=None, **more)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Simulated engines; loops of verl's and for verl."""
    made = created(
        config_of(
            tmp_path_factory.mktemp("logs"),
            *("+zagent.engine.kind=sim", "+zagent.engine.count=2", "+zagent.rollout.prompt_overflow=error"),
            "+zagent.rollout.imports=[zagent.adapters.verl.loops,verl_style]",
        )
    )
    # The thread that launched it passes it on when it ends: what a test leaves behind is counted from then on.
    eventually(lambda: str(made.manager._launched.pid) in Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    yield made
    made.close()


def test_this_environment_is_verls() -> None:
    """Its pins are not SGLang's."""
    assert importlib.metadata.version("verl") == "0.9.1"
    assert importlib.util.find_spec("sglang") is None
    found = [int(part) for part in importlib.metadata.version("transformers").split(".")[:2]]
    assert [5, 5] <= found < [5, 11]


def test_a_batch_goes_there_and_back(manager: Any) -> None:
    """verl's `DataProto` for verl's, which the trainer can pad, split, unite with what it kept, and take apart."""
    kept = batch(3)
    asked = kept.pop(non_tensor_batch_keys=["raw_prompt"])
    asked.non_tensor_batch.update(kept.non_tensor_batch)
    asked.meta_info = {"global_steps": 1, "eos_token_id": 2, "recompute_log_prob": False}
    padded, size = pad_dataproto_to_divisor(asked.repeat(2, interleave=True), 4)
    out = manager.generate_sequences(padded)
    assert isinstance(out, DataProto)
    out = unpad_dataproto(out, size)
    assert len(out) == 6
    assert out.batch["prompts"].shape == (6, PROMPT)
    assert out.batch["responses"].shape == out.batch["rollout_log_probs"].shape == (6, RESPONSE)
    assert out.batch["input_ids"].shape == out.batch["position_ids"].shape == (6, PROMPT + RESPONSE)
    assert out.meta_info["timing"]["agent_loop/generate_sequences/max"] > 0
    assert list(out.non_tensor_batch["multi_modal_inputs"]) == [{}] * 6
    out.meta_info.pop("timing")
    united = kept.repeat(2, interleave=True).union(out)
    assert united.non_tensor_batch["uid"].tolist() == ["row-0", "row-0", "row-1", "row-1", "row-2", "row-2"]
    assert len(DataProto.concat(united.chunk(3))) == 6
    assert not torch.equal(out.batch["responses"][0], out.batch["responses"][1])  # two samples of one prompt


def test_validation_is_greedy(manager: Any) -> None:
    """By `val_kwargs`; the sampling of training is another."""
    asked = batch(2)
    asked.meta_info = {"validate": True, "global_steps": 1}
    rollout = manager.manager.config.rollout
    assert (rollout.val_kwargs.temperature, rollout.temperature) == (0.0, 0.7)
    first, second = (manager.generate_sequences(asked).batch["responses"] for _ in range(2))
    assert torch.equal(first, second)


def test_it_may_be_awaited(manager: Any) -> None:
    """As one-step-off trainers do; and called from a plain function while a loop runs."""

    async def awaited() -> Any:
        return await manager.generate_sequences(batch(2))

    async def called() -> Any:
        return plainly()

    def plainly() -> Any:
        return manager.generate_sequences(batch(2))

    expected = plainly().batch["responses"]
    assert torch.equal(asyncio.run(awaited()).batch["responses"], expected)
    assert torch.equal(asyncio.run(called()).batch["responses"], expected)


class Handle:
    """A reward worker's, without Ray: `compute_score.remote(data)` is awaited."""

    def __init__(self, manager: Any) -> None:
        self.rows = 0
        self._manager = manager
        self.compute_score = self

    async def remote(self, data: Any) -> Any:
        self.rows += len(data)
        return await self._manager.run_single(data)


def test_verls_reward_loop_scores_the_rows(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own reward manager, as streamed by its own workers: `rm_scores`, and what else the function says."""
    from transformers import AutoTokenizer

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        return {"score": float(len(solution_str)), "acc": extra_info["index"] / 2, "truth": ground_truth}

    tokenizer = AutoTokenizer.from_pretrained(TINY)

    async def handles() -> list[Handle]:
        config = OmegaConf.create({"reward": {"reward_kwargs": {}}})
        return [Handle(NaiveRewardManager(config, tokenizer, score)) for _ in range(2)]

    async def scored() -> Any:
        monkeypatch.setattr(manager, "_scorers", await handles())
        return await manager.generate_sequences(batch(3)), [handle.rows for handle in manager._scorers]

    out, rows = asyncio.run(scored())
    assert rows == [2, 1]
    tensor, extra = extract_reward(out)
    texts = [
        tokenizer.decode(row[row != tokenizer.pad_token_id], skip_special_tokens=True) for row in out.batch["responses"]
    ]
    assert tensor.sum(dim=1).tolist() == [float(len(text)) for text in texts]
    assert (tensor != 0).sum(dim=1).tolist() == [1, 1, 1]
    assert extra["acc"].tolist() == [0.0, 0.5, 1.0]
    assert set(extra) >= {"acc", "score", "truth"}


def test_what_is_not_there_is_refused(manager: Any, tmp_path: Path) -> None:
    """Distillation, and verl's V1 trainer with its TransferQueue."""
    with pytest.raises(ConfigError, match="distillation"):
        load_class_from_fqn(MANAGER, "manager")(config=manager.config, teacher_client={"teacher": object()})
    with pytest.raises(InputError, match=r"trainer\.use_v1=False"):
        manager.generate_sequences(zagent.DataProto())


def test_a_cluster_that_runs_already_is_joined(manager: Any, tmp_path: Path) -> None:
    """If it samples as the trainer's configuration says."""
    endpoint = f"+zagent.endpoint='{manager.manager.endpoint}'"
    joined = created(config_of(tmp_path, endpoint))
    assert len(joined.generate_sequences(batch(2))) == 2
    joined.close()
    with pytest.raises(ConfigError, match=r"temperature: 0\.9 here, 0\.7 there"):
        created(config_of(tmp_path, endpoint, "actor_rollout_ref.rollout.temperature=0.9"))


def test_loops_written_for_verl_run_on_its_own_classes(manager: Any) -> None:
    """Registered under verl's decorator; tokens, mask and log-probabilities as they keep them."""
    asked = batch(2, "two_turns")
    asked.non_tensor_batch["reply"] = np.array(["And then?"] * 2, object)
    out = manager.generate_sequences(asked)
    assert out.non_tensor_batch["error"].tolist() == [None, None]
    masks = out.batch["response_mask"]
    assert (out.batch["rollout_log_probs"][masks == 0] == 0).all()
    assert (out.batch["rollout_log_probs"][masks == 1] < 0).all()
    assert out.non_tensor_batch["__num_turns__"].tolist() == [4, 4]


def test_verls_own_loop_is_ours(manager: Any) -> None:
    """`SingleTurnAgentLoop`, unchanged: the tokens that zagent's gives for the same seeds."""
    theirs, ours = (manager.generate_sequences(batch(3, name)).batch for name in (VERLS_OWN, "single_turn_agent"))
    for key in ("prompts", "responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(theirs[key], ours[key]), key


@pytest.mark.sglang
@pytest.mark.timeout(580)
def test_real_engines_from_another_environment(tmp_path: Path) -> None:
    """SGLang with its transformers, the trainer and verl's loop with theirs: log-probabilities are those of a float32
    forward here; and new weights are taken."""
    config = config_of(
        tmp_path / "logs",
        *(f"+zagent.engine.python={ENGINES}", "+zagent.engine.count=1", "+zagent.engine.args.dtype=float32"),
        *("+zagent.engine.args.mem_fraction_static=0.8", "+zagent.engine.args.max_running_requests=32"),
        "+zagent.rollout.imports=[zagent.adapters.verl.loops]",
    )
    made = created(config)
    try:
        _check_exact(made.generate_sequences(batch(4, VERLS_OWN)), TINY)
        early = str(PACKAGED["tiny-early"])
        made.update_weights(early, global_steps=7)
        out = made.generate_sequences(batch(4, VERLS_OWN))
        _check_exact(out, early)
        assert set(out.non_tensor_batch["max_global_steps"]) == {7}
    finally:
        made.close()


def _check_exact(out: Any, model: str) -> None:
    reference = Reference(model)
    for row in range(len(out)):
        real = out.batch["attention_mask"][row].bool()
        prompt = out.batch["prompts"][row][real[:PROMPT]].tolist()
        response = out.batch["responses"][row][real[PROMPT:]].tolist()
        found = out.batch["rollout_log_probs"][row][: len(response)].numpy()
        assert np.abs(found - reference.log_probs(prompt, response, 0.7)).max() < 1e-3
