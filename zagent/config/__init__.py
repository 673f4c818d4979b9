"""The configuration: one frozen section per room, unknown keys refused.

Sections are resolved on first use: each costs some milliseconds, and no child needs them all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zagent.config.cluster import BrokerConfig as BrokerConfig
    from zagent.config.cluster import LauncherConfig as LauncherConfig
    from zagent.config.cluster import LogsConfig as LogsConfig
    from zagent.config.cluster import RoutingConfig as RoutingConfig
    from zagent.config.cluster import ServiceConfig as ServiceConfig
    from zagent.config.cluster import WorkerConfig as WorkerConfig
    from zagent.config.config import Config as Config
    from zagent.config.engine import OWNED_ENGINE_ARGS as OWNED_ENGINE_ARGS
    from zagent.config.engine import EngineConfig as EngineConfig
    from zagent.config.engine import ModelConfig as ModelConfig
    from zagent.config.engine import SimConfig as SimConfig
    from zagent.config.rollout import MultiTurnConfig as MultiTurnConfig
    from zagent.config.rollout import RewardConfig as RewardConfig
    from zagent.config.rollout import RolloutConfig as RolloutConfig
    from zagent.config.rollout import TraceConfig as TraceConfig
    from zagent.config.rollout import ValConfig as ValConfig
    from zagent.config.section import Section as Section

_HOME = {
    "BrokerConfig": "cluster",
    "LauncherConfig": "cluster",
    "LogsConfig": "cluster",
    "RoutingConfig": "cluster",
    "ServiceConfig": "cluster",
    "WorkerConfig": "cluster",
    "Config": "config",
    "OWNED_ENGINE_ARGS": "engine",
    "EngineConfig": "engine",
    "ModelConfig": "engine",
    "SimConfig": "engine",
    "MultiTurnConfig": "rollout",
    "RewardConfig": "rollout",
    "RolloutConfig": "rollout",
    "TraceConfig": "rollout",
    "ValConfig": "rollout",
    "Section": "section",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zagent.config' has no attribute {name!r}")
    return getattr(import_module(f"zagent.config.{_HOME[name]}"), name)
