"""The processes beside the engines: workers, services, broker, launcher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zagent.config.engine import EngineConfig, ModelConfig
from zagent.config.section import Section


class WorkerConfig(Section):
    """The agent-loop workers."""

    count: int = Field(2, ge=1)
    #: Trajectories one worker runs at once.
    max_in_flight: int = Field(1024, ge=1)
    #: Resident memory at which a worker is ended, in GB (10⁹ bytes): a row that floods memory must not take the machine
    #: down. `auto`: all workers together may take half of what is free at the start, and each at least 2 GB. Without
    #: its children's.
    memory_limit_gb: float | Literal["auto"] | None = "auto"

    @field_validator("memory_limit_gb")
    @classmethod
    def _positive(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and value <= 0:
            raise ValueError("must be more than 0, auto, or null for none")
        return value


#: Calls one process of a class is given at once, unless `max_in_flight` says otherwise.
SERVICE_MAX_IN_FLIGHT = 64


class ServiceConfig(Section):
    """One pool of user actors: a class of the user's, or a second pool of engines (a judge with a model of its own)."""

    #: Dotted path of the class; its public methods are callable by the pool's name.
    target: str | None = None
    #: Processes of the class.
    count: int = Field(1, ge=1)
    #: The constructor's keyword arguments.
    args: dict[str, Any] = Field(default_factory=dict)
    #: On top of the launcher's environment. A class sees no GPU unless CUDA_VISIBLE_DEVICES is set here.
    env: dict[str, str] = Field(default_factory=dict)
    #: Calls one process is given at once; more wait in the broker. Default: 64, or the engine's own `max_in_flight`.
    max_in_flight: int | None = Field(None, ge=1)
    #: As a worker's, of one process of the class; none by default.
    memory_limit_gb: float | None = Field(None, gt=0)
    #: Instead of `target`: engines that serve `model`.
    model: ModelConfig | None = None
    #: Of `model`. `count` is 1 by default, and cannot be `auto`.
    engine: EngineConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_engine(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("model") is None:
            return data
        engine = {} if data.get("engine") is None else data["engine"]
        return {**data, "engine": {"count": 1, **engine} if isinstance(engine, dict) else engine}

    @model_validator(mode="after")
    def _one_kind(self) -> ServiceConfig:
        if (self.target is None) == (self.model is None):
            raise ValueError("needs either target (a class) or model (an engine pool)")
        if self.engine is not None and self.model is None:
            raise ValueError("engine belongs to model: it says how that model is served")
        if self.model is not None and (self.count != 1 or self.args):
            raise ValueError("count and args are a class's; of a model it is engine.count and engine.args")
        if self.model is not None and self.memory_limit_gb is not None:
            raise ValueError("memory_limit_gb is a class's: an engine's memory is engine.args' business")
        if self.engine is not None and self.engine.count == "auto":
            raise ValueError("engine.count must be a number here: auto is for the policy's engines")
        return self

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        numbers = {key: str(one) for key, one in value.items() if type(one) in (int, float)}
        return {**value, **numbers}  # `env.THREADS=4` is a number to YAML

    @field_validator("env")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(f"{name!r} cannot be a variable of an environment")
            if name.startswith("ZAGENT_"):
                raise ValueError(f"may not set {name!r}: zagent owns it")
        return value

    @property
    def credits(self) -> int:
        """Calls one process is given at once."""
        if self.engine is None:
            return self.max_in_flight or SERVICE_MAX_IN_FLIGHT
        return min(self.engine.max_in_flight, self.max_in_flight or self.engine.max_in_flight)


class ThresholdConfig(Section):
    """What counts as overloaded: an engine that is beyond both beside the least busy one, in calls in flight and
    waiting for it (sglang-router's `balance_abs_threshold` and `balance_rel_threshold`)."""

    #: More calls than that one.
    abs: int = Field(32, ge=0)
    #: Times as many.
    rel: float = Field(1.5, ge=1)


class RoutingConfig(Section):
    """How the broker chooses."""

    #: Sessions whose engine is remembered while they have nothing in flight.
    sticky_cache_size: int = Field(10_000, ge=1)
    #: Calls one of the policy's engines is given at once, below its own `max_in_flight`. More wait in the broker: those
    #: of a session for its engine, others for whichever has room first. At or a little above what an engine decodes at
    #: once (its batch), no engine queues what another could begin; below, engines idle.
    max_in_flight_per_engine: int | None = Field(None, ge=1)
    #: Bring the samples of one prompt to one engine, which then computes the prompt once, unless that is overloaded.
    group: bool = False
    #: When it is. Beyond it, the group's next samples go to the least busy engine.
    group_over: ThresholdConfig = ThresholdConfig(abs=8, rel=1.5)
    #: When a session leaves its overloaded engine, and the cache there, for the least busy one; null = never. Looked at
    #: with each call that comes: one that waits already for room at its engine goes on waiting there.
    rebind_over: ThresholdConfig | None = None
    #: Write each assignment as a JSON line to this file (who got a call, why, and what everybody had in flight).
    record: str | None = None

    @property
    def thresholds(self) -> dict[str, tuple[int, float] | None]:
        """Of the optional policies; None = off."""
        group, rebind = self.group_over, self.rebind_over
        return {
            "group_over": (group.abs, group.rel) if self.group else None,
            "rebind_over": None if rebind is None else (rebind.abs, rebind.rel),
        }


class BrokerConfig(Section):
    """The broker's place and limits."""

    #: `ipc://PATH` or `tcp://HOST:PORT` (port 0 = any); default: ipc in the run directory.
    endpoint: str | None = None
    #: Calls that may wait in the broker for a member; also the rows one manager keeps in flight.
    max_pending: int = Field(100_000, ge=1)
    #: Path of the key file for TCP, made if it is not there. Beside it lies `FILE.client`, which every host needs that
    #: takes part; who has not got it is not let in.
    keys: str | None = Field(None, min_length=1)
    #: Allow TCP without encryption and authentication.
    insecure: bool = False

    @model_validator(mode="after")
    def _check(self) -> BrokerConfig:
        endpoint = self.endpoint or "ipc://"
        tcp = endpoint.startswith("tcp://")
        if not tcp and not endpoint.startswith("ipc://"):
            raise ValueError(f"endpoint must begin with ipc:// or tcp://, got {self.endpoint!r}")
        if tcp and "?" in endpoint:
            raise ValueError(f"endpoint={endpoint!r} is where peers connect to: give the key file as broker.keys")
        if self.keys is not None and not tcp:
            raise ValueError(f"keys are for tcp:// endpoints: who may open the socket's file decides at {endpoint!r}")
        if tcp and self.keys is None and not self.insecure:
            raise ValueError(
                "tcp is open to everybody who reaches it: give broker.keys=FILE (made if it is not there), or say"
                " broker.insecure=true on a trusted network"
            )
        return self


class LauncherConfig(Section):
    """Deadlines of the supervisor, in seconds."""

    #: All processes ready. A large model from cold storage takes minutes.
    start_timeout_s: float = Field(900.0, gt=0)
    #: TERM to KILL.
    stop_timeout_s: float = Field(3.0, gt=0)
    #: How often one process is started again when it died, within `restart_window_s`. Then it stays gone; the last of
    #: the engines or workers, or the broker, ends the run, the last one of a service its pool.
    max_restarts: int = Field(5, ge=0)
    restart_window_s: float = Field(3600.0, gt=0)
    #: Wait before it is (the broker: at once); doubled by each start that failed by itself, up to a minute (the
    #: broker: 2 s).
    restart_wait_s: float = Field(0.5, ge=0)
    #: A process that gave no sign of life for as long, or whose event loop did not turn, is ended, and started again;
    #: its log shows all stacks. Above the longest time that a tool or loop may block its worker.
    hung_after_s: float = Field(60.0, ge=5)


class LogsConfig(Section):
    """One log file per child process, outside the run directory."""

    #: Default: `$XDG_STATE_HOME/zagent/logs` (`~/.local/state/zagent/logs`).
    dir: str | None = None
    #: Runs kept.
    keep: int = Field(10, ge=1)
