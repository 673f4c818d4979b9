"""From verl's configuration to zagent's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zagent.config import Config, RolloutConfig
from zagent.errors import ConfigError

#: Keys of verl's `actor_rollout_ref.rollout` that zagent's `rollout` has under the same name.
_ROLLOUT = ("prompt_length", "response_length", "temperature", "top_p", "top_k", "calculate_log_probs")
#: The same of `multi_turn`.
_MULTI_TURN = (
    *("max_assistant_turns", "max_user_turns", "tool_config_path", "interaction_config_path", "format"),
    *("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side"),
)
_VAL_KWARGS = ("temperature", "top_p", "top_k")
#: What a cluster that somebody else launched must have as the trainer's configuration says it.
_AGREED = (*_ROLLOUT, "val_kwargs")


def config_of(config: DictConfig) -> Config:
    """What a verl trainer with ``config`` (the whole of it) wants of zagent. Its own section `zagent` wins: any of
    zagent's keys (`+zagent.engine.count=4`).

    Raises:
        ConfigError: a key of `zagent` that does not exist, or something that zagent does otherwise.
    """
    ours = OmegaConf.create(_translated(OmegaConf.to_container(config, resolve=True)))
    section = {key: value for key, value in _section(config).items() if key != "endpoint"}
    return Config.from_dict(OmegaConf.to_container(OmegaConf.merge(ours, section)))


def endpoint_of(config: DictConfig) -> str | None:
    """`zagent.endpoint`: of a cluster that runs already; None: the trainer is to launch one."""
    endpoint = _section(config).get("endpoint")
    return None if endpoint is None else str(endpoint)


def check_agreed(ours: RolloutConfig, theirs: RolloutConfig) -> None:
    """Raise `ConfigError` where the cluster's section `rollout` (``theirs``) is not what the trainer's configuration
    says (``ours``): the trainer would learn from something else than was sampled."""
    pairs = {key: (getattr(ours, key), getattr(theirs, key)) for key in _AGREED}
    differing = [f"{key}: {mine!r} here, {other!r} there" for key, (mine, other) in pairs.items() if mine != other]
    if differing:
        raise ConfigError(f"zagent.endpoint: that cluster has another rollout section: {'; '.join(differing)}")


def _section(config: DictConfig) -> Mapping[str, Any]:
    found = OmegaConf.select(config, "zagent")
    made: Any = {} if found is None else OmegaConf.to_container(found, resolve=True)
    return made  # type: ignore[no-any-return]


def _translated(config: Any) -> dict[str, Any]:
    rollout, model = config["actor_rollout_ref"]["rollout"], config["actor_rollout_ref"]["model"]
    agent, turns = rollout["agent"], rollout.get("multi_turn") or {}
    loops = agent.get("agent_loop_config_path")
    if turns.get("function_tool_path"):
        raise ConfigError("multi_turn.function_tool_path: name the module in zagent.rollout.imports instead")
    return {
        "model": {"path": model["path"], "trust_remote_code": bool(model.get("trust_remote_code"))},
        "engine": {"tensor_parallel_size": rollout.get("tensor_model_parallel_size", 1), "args": _engine_args(rollout)},
        "worker": {"count": agent["num_workers"]},
        "rollout": {
            **_sampling(rollout, _ROLLOUT),
            "seed": rollout.get("seed", 0),
            "prompt_overflow": "left",
            "val_kwargs": _sampling(rollout["val_kwargs"], _VAL_KWARGS),
            "multi_turn": {key: turns[key] for key in _MULTI_TURN if turns.get(key) is not None},
            "agent": agent.get("default_agent_loop") or "single_turn_agent",
            "agent_loop_config_path": loops,
            "apply_chat_template_kwargs": (config.get("data") or {}).get("apply_chat_template_kwargs") or {},
            "imports": [] if loops is None else ["zagent.adapters.verl.loops"],
        },
    }


def _sampling(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    found = {key: section[key] for key in keys if section.get(key) is not None}
    return {**found, "top_k": found.get("top_k") or -1}  # vLLM's 0 is off, too


def _engine_args(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's names of what verl's servers are told."""
    named = {
        "dtype": rollout.get("dtype"),
        "mem_fraction_static": rollout.get("gpu_memory_utilization"),
        "max_running_requests": rollout.get("max_num_seqs"),
        "context_length": rollout.get("max_model_len"),
        **((rollout.get("engine_kwargs") or {}).get("sglang") or {}),
    }
    return {key: value for key, value in named.items() if value is not None}
