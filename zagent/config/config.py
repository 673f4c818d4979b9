"""The configuration as a whole: YAML files and ``key=value`` overrides, merged and validated.

OmegaConf merges them (the habit of verl and Hydra users); validation comes before any process starts. Each process is
given the sections it needs, as plain data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from zagent.config.cluster import BrokerConfig, LauncherConfig, LogsConfig, RoutingConfig, ServiceConfig, WorkerConfig
from zagent.config.engine import EngineConfig, ModelConfig
from zagent.config.explain import explain
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
        from zagent.config.files import merged  # brings OmegaConf in: 0.1 s that children need not spend

        return cls.from_dict(merged(path, overrides))

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
