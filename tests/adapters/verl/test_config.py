"""From verl's configuration to zagent's."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from zagent.adapters.verl.config import check_agreed, config_of, endpoint_of
from zagent.config import Config, RolloutConfig
from zagent.errors import ConfigError

#: As verl 0.9.1's own files say it, as far as it matters here.
VERLS: dict[str, Any] = {
    "data": {"max_prompt_length": 512, "apply_chat_template_kwargs": {"enable_thinking": False}},
    "actor_rollout_ref": {
        "model": {"path": "tiny", "trust_remote_code": False},
        "rollout": {
            "name": "sglang",
            "temperature": 0.8,
            "top_k": -1,
            "top_p": 0.9,
            "prompt_length": "${data.max_prompt_length}",
            "response_length": 256,
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.5,
            "max_num_seqs": 64,
            "max_model_len": None,
            "tensor_model_parallel_size": 2,
            "seed": 42,
            "calculate_log_probs": True,
            "val_kwargs": {"top_k": -1, "top_p": 1.0, "temperature": 0, "n": 1, "do_sample": False},
            "engine_kwargs": {"vllm": {}, "sglang": {"attention_backend": "triton"}},
            "multi_turn": {"enable": True, "max_user_turns": None, "max_assistant_turns": 3, "format": "hermes"},
            "agent": {"num_workers": 5, "default_agent_loop": "tool_agent", "agent_loop_config_path": None},
        },
    },
}


def config(**updates: Any) -> Any:
    made = OmegaConf.create(VERLS)
    for key, value in updates.items():
        OmegaConf.update(made, key.replace("__", "."), value, force_add=True)
    return made


def test_what_both_have_is_taken_over() -> None:
    """Sampling, lengths, turns, workers, engines' memory, under zagent's and SGLang's names."""
    made = config_of(config())
    rollout = made.rollout
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.seed) == (0.8, 0.9, -1, 42)
    assert (rollout.prompt_length, rollout.response_length) == (512, 256)
    assert (rollout.val_kwargs.temperature, rollout.val_kwargs.top_p) == (0.0, 1.0)
    assert (rollout.agent, rollout.multi_turn.max_assistant_turns, rollout.multi_turn.max_user_turns) == (
        *("tool_agent", 3, None),
    )
    assert rollout.apply_chat_template_kwargs == {"enable_thinking": False}
    assert rollout.prompt_overflow == "left"
    assert rollout.imports == ()
    assert (made.model.path, made.worker.count, made.engine.tensor_parallel_size) == ("tiny", 5, 2)
    assert made.engine.args == {
        "dtype": "bfloat16",
        "mem_fraction_static": 0.5,
        "max_running_requests": 64,
        "attention_backend": "triton",
    }


def test_its_own_section_wins() -> None:
    """Any key of zagent's; a wrong one is named."""
    made = config_of(config(zagent={"engine": {"kind": "sim", "count": 3}, "rollout": {"imports": ["my_loops"]}}))
    assert (made.engine.kind, made.engine.count, made.engine.tensor_parallel_size) == ("sim", 3, 2)
    assert made.rollout.imports == ("my_loops",)
    with pytest.raises(ConfigError, match=r"engine\.cuont"):
        config_of(config(zagent={"engine": {"cuont": 3}}))


def test_top_k_may_be_off_in_two_ways() -> None:
    """vLLM's 0, and −1."""
    assert config_of(config(actor_rollout_ref__rollout__top_k=0)).rollout.top_k == -1


def test_loops_of_a_file_may_be_verls() -> None:
    """So the module that knows them is imported first."""
    made = config_of(config(actor_rollout_ref__rollout__agent__agent_loop_config_path="loops.yaml"))
    assert made.rollout.imports == ("zagent.adapters.verl.loops",)
    assert str(made.rollout.agent_loop_config_path).endswith("/loops.yaml")


def test_what_zagent_does_otherwise_is_refused() -> None:
    """Not ignored."""
    with pytest.raises(ConfigError, match="function_tool_path"):
        config_of(config(actor_rollout_ref__rollout__multi_turn__function_tool_path="tools.py"))


def test_a_cluster_that_runs_already() -> None:
    """Its endpoint is no key of zagent's own; its rollout section must be the trainer's."""
    joined = config(zagent={"endpoint": "tcp://host:1"})
    assert endpoint_of(joined) == "tcp://host:1"
    assert endpoint_of(config()) is None
    ours = config_of(joined).rollout
    check_agreed(ours, ours)
    with pytest.raises(ConfigError, match=r"temperature: 0\.8 here, 1\.0 there; top_p: 0\.9 here, 1\.0 there"):
        check_agreed(ours, RolloutConfig(prompt_length=512, response_length=256))
    assert Config().rollout.temperature == 1.0
