"""The configuration: one frozen section per room, unknown keys refused.

YAML files and ``key=value`` overrides are merged by OmegaConf (the habit of verl and Hydra users) and validated here,
before any process starts. Each process is given the sections it needs, as plain data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from yaml import YAMLError

from zagent.config_errors import explain, explain_value, explain_yaml
from zagent.errors import ConfigError


class Section(BaseModel):
    """Frozen; an unknown key is an error, and so are NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Which model, and how its tokenizer is loaded."""

    #: A directory, a hub id, or the built-in `smollm2-135m`.
    path: str = "smollm2-135m"
    #: Where the tokenizer lies, if not beside the model.
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    #: Load the tokenizer with transformers' AutoTokenizer in workers too. It pulls torch in (770 MB, 4 to 6 s per
    #: process against 125 MB and 1 s); needed only for tokenizers without a `tokenizer.json`.
    use_auto_tokenizer: bool = False


class SimConfig(Section):
    """The simulated engine: real protocol, invented tokens. Speeds are per sequence; 0 = no latency."""

    prefill_tokens_per_s: float = Field(0.0, ge=0)
    decode_tokens_per_s: float = Field(0.0, ge=0)
    #: Sequences that decode at once; more wait in the engine.
    max_batch: int = Field(256, ge=1)
    #: Tokens the prefix cache holds; 0 = no prefix cache.
    kv_capacity_tokens: int = Field(1_000_000, ge=0)
    #: Default: the model's, so that the workers' tokenizer knows every id; 32 000 where there is no model.
    vocab_size: int | None = Field(None, ge=32, le=2**20)
    context_length: int = Field(131_072, ge=2)
    #: Chance per token of ending the answer (the id `eos_token_id`); 0 = always run to the token limit.
    eos_probability: float = Field(0.0, ge=0, le=1)
    eos_token_id: int = Field(2, ge=0)
    #: Of the invented tokens, beside each call's own seed.
    seed: int = 0
    #: Fault script, see docs/simulated-engine.md.
    faults: tuple[dict[str, Any], ...] = ()
    #: Simulated engines hosted by one process.
    per_process: int = Field(1, ge=1)


#: Engine arguments that zagent sets itself.
OWNED_ENGINE_ARGS = frozenset(
    (
        *("model_path", "tokenizer_path", "trust_remote_code", "skip_tokenizer_init", "weight_version"),
        *("host", "port", "nccl_port", "dist_init_addr", "device", "base_gpu_id", "gpu_id_step"),
        *("tp_size", "tensor_parallel_size", "dp_size", "data_parallel_size", "pp_size", "nnodes", "node_rank"),
        *("random_seed", "custom_sigquit_handler", "sleep_on_idle", "allow_auto_truncate"),
    )
)


class EngineConfig(Section):
    """The engine pool."""

    kind: Literal["sglang", "sim"] = "sglang"
    #: Engines to start. `auto`: one per GPU slice; on a CPU what memory allows (5 GB each), at most 2.
    count: int | Literal["auto"] = "auto"
    tensor_parallel_size: int = Field(1, ge=1)
    #: Devices engines may use (indices or UUIDs, order kept); default: all that are visible.
    gpus: tuple[str, ...] | None = None
    #: Passed to SGLang's ServerArgs as they are.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Calls one engine is given at once; SGLang batches and queues among them.
    #: `routing.max_in_flight_per_engine` lowers it.
    max_in_flight: int = Field(512, ge=1)
    sim: SimConfig = SimConfig()

    @field_validator("gpus", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return [str(v) for v in value] if isinstance(value, (list, tuple)) else value

    @field_validator("count")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @field_validator("args")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in OWNED_ENGINE_ARGS:
                raise ValueError(f"may not set {key!r}: zagent owns it")
        return value


class WorkerConfig(Section):
    """The agent-loop workers."""

    count: int = Field(2, ge=1)
    #: Trajectories one worker runs at once.
    max_in_flight: int = Field(1024, ge=1)


class ValConfig(Section):
    """Sampling for `meta_info["validate"]`: greedy."""

    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1


class RolloutConfig(Section):
    """What a trajectory is, and how it is sampled."""

    agent: str = "single_turn_agent"
    #: Samples per prompt of a batch job; `generate_sequences` never multiplies rows.
    n: int = Field(1, ge=1)
    prompt_length: int = Field(1024, ge=1)
    response_length: int = Field(1024, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    calculate_log_probs: bool = True
    #: Enters each engine call's seed, with global_steps, uid (or index), sample and turn. Simulated engines honour it;
    #: SGLang only with `engine.args.enable_deterministic_inference=true`.
    seed: int = 0
    val_kwargs: ValConfig = ValConfig()
    #: `error` fails the row; `left` drops the prompt's head before the engine sees it, with a warning.
    prompt_overflow: Literal["error", "left"] = "error"
    #: Share of rows that may fail before `generate_sequences` raises RolloutError.
    max_failed_fraction: float = Field(0.0, ge=0, le=1)
    #: Modules imported in every worker, so that their `@register` works there.
    imports: tuple[str, ...] = ()
    #: YAML list of `{name, _target_, …}`.
    agent_loop_config_path: str | None = None
    #: The same on every turn.
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    #: Wall-clock seconds one trajectory may take.
    trajectory_timeout_s: float = Field(3600.0, gt=0)

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("must be -1 (all) or at least 1")
        return value


class RoutingConfig(Section):
    """How the broker chooses."""

    #: Sessions whose engine is remembered while they have nothing in flight.
    sticky_cache_size: int = Field(10_000, ge=1)
    max_in_flight_per_engine: int | None = Field(None, ge=1)
    #: Write each assignment as a JSON line to this file (who got a call, why, and what everybody had in flight).
    record: str | None = None


class BrokerConfig(Section):
    """The broker's place and limits."""

    #: `ipc://PATH` or `tcp://HOST:PORT` (port 0 = any); default: ipc in the run directory.
    endpoint: str | None = None
    #: Calls that may wait in the broker for a member; also the rows one manager keeps in flight.
    max_pending: int = Field(100_000, ge=1)
    #: Allow TCP without encryption and authentication.
    insecure: bool = False

    @model_validator(mode="after")
    def _check(self) -> BrokerConfig:
        if self.endpoint is not None and not self.endpoint.startswith(("ipc://", "tcp://")):
            raise ValueError(f"endpoint must begin with ipc:// or tcp://, got {self.endpoint!r}")
        if self.endpoint and self.endpoint.startswith("tcp://") and not self.insecure:
            raise ValueError("tcp is open to everybody who reaches it: say broker.insecure=true on a trusted network")
        return self


class LauncherConfig(Section):
    """Deadlines of the supervisor, in seconds."""

    #: All processes ready. A large model from cold storage takes minutes.
    start_timeout_s: float = Field(900.0, gt=0)
    #: TERM to KILL.
    stop_timeout_s: float = Field(3.0, gt=0)


class LogsConfig(Section):
    """One log file per child process, outside the run directory."""

    #: Default: `$XDG_STATE_HOME/zagent/logs` (`~/.local/state/zagent/logs`).
    dir: str | None = None
    #: Runs kept.
    keep: int = Field(10, ge=1)


class Config(Section):
    """The whole configuration. `Config.load` builds one from YAML and overrides."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    routing: RoutingConfig = RoutingConfig()
    broker: BrokerConfig = BrokerConfig()
    launcher: LauncherConfig = LauncherConfig()
    logs: LogsConfig = LogsConfig()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> Config:
        """YAML at ``path`` (optional), then ``overrides`` (``key=value``, OmegaConf's dot-list).

        Raises:
            ConfigError: names each wrong key with its value and the nearest valid name.
        """
        if isinstance(overrides, str):
            raise ConfigError(f"overrides must be a list of key=value, got the text {overrides!r}")
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise ConfigError(
                f"the configuration's path must be text, got a {type(path).__name__}; see Config.from_dict"
            )
        merged = OmegaConf.create({})
        if path is not None:
            merged = OmegaConf.merge(merged, _read(path))  # type: ignore[assignment]
        merged = OmegaConf.merge(merged, _dotlist(overrides))  # type: ignore[assignment]
        try:
            data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(explain_value(error)) from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Config:
        """A validated configuration from plain data. Raises `ConfigError`."""
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from error
        return config._with_absolute_paths()

    def _with_absolute_paths(self) -> Config:
        """Relative paths are the caller's; children may run in another directory."""
        rollout = self.rollout.model_copy(
            update={"agent_loop_config_path": _absolute(self.rollout.agent_loop_config_path)}
        )
        routing = self.routing.model_copy(update={"record": _absolute(self.routing.record)})
        return self.model_copy(update={"rollout": rollout, "routing": routing})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back (JSON types only)."""
        return self.model_dump(mode="json")


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _read(path: str | os.PathLike[str]) -> Any:
    name = os.fspath(path)
    try:
        loaded = OmegaConf.load(name)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{name}: {explain_yaml(error)}") from error
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{name}: must be a mapping of sections")
    return loaded


def _dotlist(overrides: Iterable[str]) -> Any:
    made = OmegaConf.create({})
    for entry in overrides:
        if "=" not in entry or entry.startswith("="):
            raise ConfigError(f"override {entry!r} is not of the form key=value")
        try:
            made.merge_with_dotlist([entry])
        except YAMLError as error:
            raise ConfigError(f"override {entry!r}: {explain_yaml(error)}") from error
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"override {entry!r}: {explain_value(error)}") from error
    return made
