"""The processes beside the engines: workers, services, broker, launcher."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from zagent.config.engine import EngineConfig, ModelConfig
from zagent.config.section import Section


class WorkerConfig(Section):
    """The agent-loop workers."""

    count: int = Field(2, ge=1)
    #: Trajectories one worker runs at once.
    max_in_flight: int = Field(1024, ge=1)


class ServiceConfig(Section):
    """One pool of user actors: a class of the user's, or a second pool of engines (a judge with a model of its own)."""

    #: Dotted path of the class; its public methods are callable by the pool's name.
    target: str | None = None
    #: Processes.
    count: int = Field(1, ge=1)
    #: The constructor's keyword arguments.
    args: dict[str, Any] = Field(default_factory=dict)
    #: On top of the launcher's environment.
    env: dict[str, str] = Field(default_factory=dict)
    #: Calls one process is given at once; more wait in the broker.
    max_in_flight: int = Field(64, ge=1)
    #: Instead of `target`: engines (`engine.count` of them) that serve `model`.
    model: ModelConfig | None = None
    engine: EngineConfig | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> ServiceConfig:
        if (self.target is None) == (self.model is None):
            raise ValueError("needs either target (a class) or model (an engine pool)")
        if self.engine is not None and self.model is None:
            raise ValueError("engine belongs to model: it says how that model is served")
        return self


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
