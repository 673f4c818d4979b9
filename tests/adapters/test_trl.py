"""What TRL's trainer gets, and what it is told it cannot have. (With the real library: tests/adapters/real.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.outcomes import failed, ok
from zagent.adapters.trl import RolloutFunc, batch_of, fields_of, rollout_reward, whole_model
from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.errors import ConfigError, InputError
from zagent.trainer.collate import collate
from zagent.types import Outcome

ASK = [[{"role": "user", "content": "A?"}], [{"role": "user", "content": "B?"}]]
SAMPLING = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_completion_length": 16,
}


class Accelerator(SimpleNamespace):
    distributed_type: Any = "NO"
    is_main_process = True
    process_index = 0

    def unwrap_model(self, model: Any) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        self.waited = True


def trainer(step: int = 0, training: bool = True, **args: Any) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(**{**SAMPLING, "generation_kwargs": None, **args}),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=training, name="policy"),
        state=SimpleNamespace(global_step=step),
        tools=None,
    )


class Manager:
    """Answers row i with the tokens i, 7, 8, of which 7 was inserted; notes what it is asked."""

    config = Config.load(overrides=["rollout.temperature=0.7", "rollout.response_length=16"])

    def __init__(self) -> None:
        self.pushed: list[Any] = []
        self.asked: list[DataProto] = []

    def update_weights(self, source: Any) -> None:
        self.pushed.append(source)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        self.asked.append(batch)
        rows = [answer(i) for i in range(len(batch))]
        return collate(rows, prompt_length=4, response_length=16, pad_token_id=99, batch=batch)


def answer(row: int, score: float | None = 0.5) -> Outcome:
    log_probs = [-0.5, 0.0, -0.25]
    return ok(row, [1, 2], [row, 7, 8], [1, 0, 1], response_logprobs=log_probs, num_turns=4, reward_score=score)


def test_each_prompt_gets_one_completion() -> None:
    """Unpadded lists in the order of the prompts, tool tokens with mask 0, and the other columns for rewards."""
    manager = Manager()
    given = RolloutFunc(manager)([ASK[0], ASK[0], ASK[1]], trainer())
    assert given["prompt_ids"] == [[1, 2]] * 3
    assert given["completion_ids"] == [[0, 7, 8], [1, 7, 8], [2, 7, 8]]
    assert given["logprobs"] == [[-0.5, 0.0, -0.25]] * 3
    assert given["env_mask"] == [[1, 0, 1]] * 3
    assert given["reward_score"] == [0.5] * 3
    assert given["__num_turns__"] == [4] * 3
    assert all(isinstance(column, list) for column in given.values())
    assert not {"raw_prompt", "uid", "prompt"} & set(given)


def test_rows_of_one_prompt_are_a_group() -> None:
    """Neighbours with the same prompt; the same prompt in a later call, or of another process, is another group."""
    asked = batch_of([ASK[0], ASK[0], ASK[1], ASK[0]], trainer(step=3), call=2)
    assert list(asked.non_tensor_batch["uid"]) == ["0/2/0", "0/2/0", "0/2/1", "0/2/2"]
    assert asked.meta_info == {"global_steps": 3, "validate": False}
    manager, rollout = Manager(), trainer()
    func = RolloutFunc(manager)
    func(ASK, rollout)
    rollout.accelerator.process_index = 1
    func(ASK, rollout)
    assert [list(batch.non_tensor_batch["uid"]) for batch in manager.asked] == [["0/0/0", "0/0/1"], ["1/1/0", "1/1/1"]]


def test_further_columns_come_from_the_prompts() -> None:
    """TRL hands nothing else of the dataset over."""
    manager = Manager()
    RolloutFunc(manager, lambda prompts: {"env": [p[0]["content"] for p in prompts]})(ASK, trainer())
    assert list(manager.asked[0].non_tensor_batch["env"]) == ["A?", "B?"]


def test_weights_are_pushed_when_the_step_has_moved() -> None:
    """And at the first call: the trainer's model may be another checkpoint than the engines'."""
    manager = Manager()
    func = RolloutFunc(manager)
    for step in (0, 0, 1, 1, 4):
        func(ASK, trainer(step))
    assert [model.name for model in manager.pushed] == ["policy"] * 3


def test_the_first_process_pushes_and_all_wait() -> None:
    """The others' engines are the same ones."""
    manager, other = Manager(), trainer()
    other.accelerator.is_main_process = False
    RolloutFunc(manager)(ASK, other)
    assert manager.pushed == []
    assert other.accelerator.waited


def test_evaluation_is_validation() -> None:
    """Sampled by `rollout.val_kwargs`."""
    assert batch_of(ASK, trainer(training=False), 0).meta_info["validate"]


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("temperature", 1.0, "0.7"),
        ("top_p", 0.9, "1.0"),
        ("top_k", 50, "-1"),
        ("min_p", 0.1, "None"),
        ("repetition_penalty", 1.1, "1.0"),
        ("max_completion_length", 256, "16"),
    ],
)
def test_another_sampling_than_the_trainers_is_refused(name: str, value: Any, ours: str) -> None:
    """TRL would learn from log-probabilities at a temperature that nobody sampled at."""
    manager = Manager()
    with pytest.raises(ConfigError, match=rf"differ: {name}={value}, here {ours}"):
        RolloutFunc(manager)(ASK, trainer(**{name: value}))
    assert manager.asked == manager.pushed == []


@pytest.mark.parametrize("args", [{"top_k": None}, {"top_k": -1}, {"min_p": 0}, {"generation_kwargs": {}}])
def test_other_words_for_the_same_are_taken(args: dict[str, Any]) -> None:
    """TRL's names of "off" are not all ours."""
    assert RolloutFunc(Manager())(ASK, trainer(**args))["prompt_ids"]


def test_what_would_be_lost_is_refused() -> None:
    """Generation keywords that reach no engine; tools that TRL would run after ours; prompts that are plain text."""
    func = RolloutFunc(Manager())
    with pytest.raises(ConfigError, match="would not reach"):
        func(ASK, trainer(generation_kwargs={"num_beams": 2}))
    armed = trainer()
    armed.tools = [print]
    with pytest.raises(ConfigError, match=r"belong to zagent's loops"):
        func(ASK, armed)
    with pytest.raises(InputError, match="conversational"):
        func(["A?"], trainer())


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", SimpleNamespace(value="FSDP")])
def test_a_model_in_pieces_is_refused(kind: Any) -> None:
    """Its state dict here would be a part, and the engines would serve that."""
    sharded = trainer()
    sharded.accelerator.distributed_type = kind
    with pytest.raises(ConfigError, match="in pieces"):
        whole_model(sharded)


def test_a_model_with_adapters_is_refused() -> None:
    """`save_pretrained` writes the adapters alone."""
    peft = trainer()
    peft.model.peft_config = {"default": object()}
    with pytest.raises(ConfigError, match="PEFT"):
        whole_model(peft)


def test_a_failed_row_is_one_masked_token() -> None:
    """TRL takes no empty rows; a model that said nothing is the same."""
    fields = fields_of(collate([answer(0), failed(1), ok(2, [5], [])], pad_token_id=99))
    assert fields["prompt_ids"] == [[1, 2], [99], [5]]
    assert fields["completion_ids"] == [[0, 7, 8], [99], [99]]
    assert fields["env_mask"] == [[1, 0, 1], [0], [0]]
    assert fields["logprobs"] == [[-0.5, 0.0, -0.25], [0.0], [0.0]]
    assert fields["status"] == ["ok", "failed", "ok"]


def test_log_probabilities_may_be_missing() -> None:
    """`rollout.calculate_log_probs=false`: TRL takes None."""
    assert fields_of(collate([ok(0)]))["logprobs"] is None


def test_the_rollouts_reward_is_handed_on() -> None:
    """None where there is none: TRL leaves such a row out of its group's baseline."""
    assert rollout_reward([["a"], ["b"]], reward_score=[0.5, None], answer=["x", "y"]) == [0.5, None]
