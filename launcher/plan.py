"""From a configuration and a machine to the processes to start. Pure: no process, socket or file is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher import processes
from launcher.machine import Machine
from launcher.ports import EnginePorts
from launcher.slots import engine_slots
from zagent.config import Config
from zagent.errors import ConfigError

#: Entry points by room.
ROOMS: Mapping[str, str] = {
    "broker": "zagent.broker.server:main",
    "engine": "zagent.engine.server:main",
    "worker": "zagent.worker.server:main",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the broker's pool ``pool``; ``epoch`` counts its starts."""

    pool: str
    name: str
    index: int
    epoch: int = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: ``entry`` (``module:function``) is given ``settings`` (JSON types) and started with ``env`` on top
    of the launcher's environment. ``settings`` of engines and workers lack the broker's endpoint, known once it serves.
    """

    name: str
    room: str
    entry: str
    settings: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    ports: EnginePorts | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run."""

    broker: ChildSpec
    engines: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What is decided per run: ``run_dir`` and ``temporary`` within it, ``secret`` that members must know to join,
    ``inductor_cache`` where torch keeps what it compiled, over runs."""

    run_id: str
    run_dir: str
    temporary: str
    inductor_cache: str
    launcher_pid: int
    secret: str


@dataclass(frozen=True, slots=True)
class Model:
    """``path`` is what `zagent.models.resolve` made of `model.path`; ``context_length`` in tokens, None = unknown."""

    path: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan rests on beside the configuration."""

    machine: Machine
    model: Model
    run: Run


def plan(config: Config, facts: Facts, take_ports: Callable[[], EnginePorts], rooms: Mapping[str, str] = ROOMS) -> Plan:
    """The processes that ``config`` asks for, on this machine. ``take_ports`` gives ports to one more SGLang engine.

    Raises:
        ConfigError: more engines than GPUs or memory allow, a GPU that is not there, tensor parallelism on a CPU,
            prompt and response beyond the context. The message has the numbers.
    """
    check_context(config, facts.model)
    slots = engine_slots(config.engine, facts.machine)
    if config.engine.kind == "sim":
        engines = _sim_engines(config, facts, len(slots), rooms["engine"])
    else:
        ports = [take_ports() for _ in slots]
        engines = _sglang_engines(config, facts, slots, ports, rooms["engine"])
    return Plan(_broker(config, facts, rooms["broker"]), engines, _workers(config, facts, rooms["worker"]))


def context_length(config: Config, model: Model) -> int | None:
    """Tokens of prompt and response together that the engines take; None if the model does not say."""
    if config.engine.kind == "sim":
        return config.engine.sim.context_length
    given = config.engine.args.get("context_length")
    return int(given) if given is not None else model.context_length


def check_context(config: Config, model: Model) -> None:
    """Refuse rows that cannot fit. Raises `ConfigError` with the three numbers."""
    context, rollout = context_length(config, model), config.rollout
    if context is not None and rollout.prompt_length + rollout.response_length > context:
        raise ConfigError(
            f"rollout.prompt_length={rollout.prompt_length} + rollout.response_length={rollout.response_length} "
            f"is beyond the context of {context} tokens ({_context_source(config)})"
        )


def _context_source(config: Config) -> str:
    if config.engine.kind == "sim":
        return "engine.sim.context_length"
    return (
        "engine.args.context_length"
        if config.engine.args.get("context_length") is not None
        else f"of {config.model.path}"
    )


def _broker(config: Config, facts: Facts, entry: str) -> ChildSpec:
    run, model = facts.run, facts.model
    resolved = config.model_copy(update={"model": config.model.model_copy(update={"path": model.path})})
    settings = {
        "endpoint": config.broker.endpoint or f"ipc://{run.run_dir}/b",
        "secret": run.secret,
        "max_pending": config.broker.max_pending,
        "sticky_cache_size": config.routing.sticky_cache_size,
        "record": config.routing.record,
        "incarnation": 1,
        "info": {
            "config": resolved.to_dict(),
            "run_id": run.run_id,
            "run_dir": run.run_dir,
            "launcher_pid": run.launcher_pid,
        },
    }
    return _child("broker", "broker", entry, run, settings)


def _child(name: str, room: str, entry: str, run: Run, settings: Mapping[str, Any], **rest: Any) -> ChildSpec:
    env = {processes.RUN_ID_VARIABLE: run.run_id, processes.CHILD_VARIABLE: name, **rest.pop("env", {})}
    return ChildSpec(name, room, entry, settings, env, **rest)


def _model_settings(config: Config, model: Model) -> dict[str, Any]:
    return {**config.model.model_dump(mode="json"), "path": model.path}


def _workers(config: Config, facts: Facts, entry: str) -> tuple[ChildSpec, ...]:
    shared = {
        "secret": facts.run.secret,
        "credits": config.worker.max_in_flight,
        "model": _model_settings(config, facts.model),
        "rollout": config.rollout.model_dump(mode="json"),
        "context_length": context_length(config, facts.model),
    }
    members = [Member("worker", f"worker-{index}", index) for index in range(config.worker.count)]
    return tuple(
        _child(m.name, "worker", entry, facts.run, {**shared, "name": m.name, "epoch": m.epoch}, members=(m,))
        for m in members
    )


def _engine_settings(config: Config, facts: Facts, members: tuple[Member, ...], ports: EnginePorts) -> dict[str, Any]:
    limit = config.routing.max_in_flight_per_engine
    return {
        "secret": facts.run.secret,
        "members": [{"name": m.name, "index": m.index, "epoch": m.epoch} for m in members],
        "credits": config.engine.max_in_flight if limit is None else min(config.engine.max_in_flight, limit),
        "model": _model_settings(config, facts.model),
        "engine": config.engine.model_dump(mode="json"),
        "seed": config.rollout.seed + members[0].index,
        "nccl_port": ports.nccl_port,
        "port": ports.port,
    }


def _sglang_engines(
    config: Config, facts: Facts, slots: Sequence[tuple[str, ...]], ports: Sequence[EnginePorts], entry: str
) -> tuple[ChildSpec, ...]:
    ranks = sum(max(1, len(slot)) for slot in slots)
    # Threads beyond the cores spin against each other: on two cores, two CPU engines of 2 threads reached 18 tokens/s
    # each at 16 requests, of 1 thread 105.
    threads = max(1, facts.machine.cores // ranks)
    made: list[ChildSpec] = []
    for index, (gpus, own) in enumerate(zip(slots, ports, strict=True)):
        members = (Member("engine", f"engine-{index}", index),)
        settings = _engine_settings(config, facts, members, own)
        env = _sglang_env(gpus, threads, facts.run)
        made.append(_child(members[0].name, "engine", entry, facts.run, settings, env=env, members=members, ports=own))
    return tuple(made)


def _sglang_env(gpus: tuple[str, ...], threads: int, run: Run) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(threads),
        # SGLang never removes its ipc sockets; below the run directory they go with the run, and their paths are short.
        "TMPDIR": run.temporary,
        "TORCHINDUCTOR_CACHE_DIR": run.inductor_cache,  # its default lies in TMPDIR, and is worth keeping
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # under torchrun an engine would wait for the trainer's store
    }


def _sim_engines(config: Config, facts: Facts, count: int, entry: str) -> tuple[ChildSpec, ...]:
    members = [Member("engine", f"engine-{index}", index) for index in range(count)]
    width = config.engine.sim.per_process
    made: list[ChildSpec] = []
    for first in range(0, count, width):
        group = tuple(members[first : first + width])
        name = group[0].name if len(group) == 1 else f"{group[0].name}-to-{group[-1].index}"
        settings = _engine_settings(config, facts, group, EnginePorts(0, 0))
        made.append(_child(name, "engine", entry, facts.run, settings, members=group))
    return tuple(made)
