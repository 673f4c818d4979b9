"""The configuration as a whole: YAML files and ``key=value`` overrides, merged and validated.

OmegaConf merges them (the habit of verl and Hydra users); validation comes before any process starts. Each process is
given the sections it needs, as plain data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, field_validator
from yaml import YAMLError

from zagent.config.cluster import BrokerConfig, LauncherConfig, LogsConfig, RoutingConfig, ServiceConfig, WorkerConfig
from zagent.config.engine import EngineConfig, ModelConfig
from zagent.config.explain import explain, explain_value, explain_yaml
from zagent.config.rollout import RewardConfig, RolloutConfig, TraceConfig
from zagent.config.section import Section
from zagent.errors import ConfigError

#: Pools that are zagent's own.
TAKEN_POOL_NAMES = frozenset({"engine", "worker", "broker"})


class Config(Section):
    """The whole configuration. `Config.load` builds one from YAML and overrides."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trace: TraceConfig = TraceConfig()
    #: User actors by pool name.
    services: dict[str, ServiceConfig] = Field(default_factory=dict)
    routing: RoutingConfig = RoutingConfig()
    broker: BrokerConfig = BrokerConfig()
    launcher: LauncherConfig = LauncherConfig()
    logs: LogsConfig = LogsConfig()

    @field_validator("services")
    @classmethod
    def _pool_names(cls, value: dict[str, ServiceConfig]) -> dict[str, ServiceConfig]:
        for name in value:
            if not name.isidentifier() or name in TAKEN_POOL_NAMES:
                taken = ", ".join(sorted(TAKEN_POOL_NAMES))
                raise ValueError(f"{name!r} cannot name a pool: an identifier is needed, other than {taken}")
        return value

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
        turns = self.rollout.multi_turn
        paths = ("tool_config_path", "interaction_config_path")
        turns = turns.model_copy(update={key: _absolute(getattr(turns, key)) for key in paths})
        loops = _absolute(self.rollout.agent_loop_config_path)
        rollout = self.rollout.model_copy(update={"agent_loop_config_path": loops, "multi_turn": turns})
        routing = self.routing.model_copy(update={"record": _absolute(self.routing.record)})
        trace = self.trace.model_copy(update={"args": _absolute_path(self.trace.args)})
        return self.model_copy(update={"rollout": rollout, "routing": routing, "trace": trace})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back (JSON types only)."""
        return self.model_dump(mode="json")


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _absolute_path(args: dict[str, Any]) -> dict[str, Any]:
    """A tracer's arguments, ``path`` absolute unless it is a URL."""
    path = args.get("path")
    return {**args, "path": _absolute(path)} if isinstance(path, str) and "://" not in path else args


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
