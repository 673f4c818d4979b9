"""The configuration: one frozen section per room, unknown keys refused."""

from zagent.config.cluster import BrokerConfig, LauncherConfig, LogsConfig, RoutingConfig, ServiceConfig, WorkerConfig
from zagent.config.config import Config
from zagent.config.engine import OWNED_ENGINE_ARGS, EngineConfig, ModelConfig, SimConfig
from zagent.config.rollout import MultiTurnConfig, RewardConfig, RolloutConfig, TraceConfig, ValConfig
from zagent.config.section import Section

__all__ = [
    "OWNED_ENGINE_ARGS",
    "BrokerConfig",
    "Config",
    "EngineConfig",
    "LauncherConfig",
    "LogsConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "RewardConfig",
    "RolloutConfig",
    "RoutingConfig",
    "Section",
    "ServiceConfig",
    "SimConfig",
    "TraceConfig",
    "ValConfig",
    "WorkerConfig",
]
