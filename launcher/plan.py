"""From a configuration and a machine to the processes to start. Pure: no process, socket or file is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.engines import POLICY_POOL, EnginePool, engine_specs, python_of
from launcher.machine import Machine
from launcher.ports import EnginePorts
from launcher.slots import all_slots
from launcher.specs import ChildSpec, Member, Plan, Run, child
from zagent.config import Config, ModelConfig
from zagent.errors import ConfigError

#: Entry points by room.
ROOMS: Mapping[str, str] = {
    "broker": "zagent.broker.server:main",
    "engine": "zagent.engine.server:main",
    "worker": "zagent.worker.server:main",
    "service": "zagent.service.server:main",
}

#: What `worker.memory_limit_gb=auto` gives each worker at least: one takes 0.15 GB, 0.8 GB with torch for images.
LEAST_WORKER_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Model:
    """``path`` is what `zagent.models.resolve` made of `model.path`; ``context_length`` in tokens, None = unknown."""

    path: str
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan rests on beside the configuration. ``service_models``: of services that are pools of engines."""

    machine: Machine
    model: Model
    run: Run
    service_models: Mapping[str, Model] = field(default_factory=dict)


def plan(config: Config, facts: Facts, take_ports: Callable[[], EnginePorts], rooms: Mapping[str, str] = ROOMS) -> Plan:
    """The processes that ``config`` asks for, on this machine. ``take_ports`` gives ports to one more SGLang engine.

    Raises:
        ConfigError: more engines than GPUs or memory allow, a GPU that is not there, tensor parallelism on a CPU,
            prompt and response beyond the context. The message has the numbers.
    """
    check_context(config, facts.model)
    slots = all_slots(config, facts.machine)
    # Threads beyond the cores spin against each other: on two cores, two CPU engines of 2 threads reached 18 tokens/s
    # each at 16 requests, of 1 thread 105.
    threads = max(1, facts.machine.cores // max(1, slots.ranks))
    engines = engine_specs(_policy(config, facts, rooms["engine"], threads), slots.policy, facts.run, take_ports)
    services: list[ChildSpec] = []
    for name, service in config.services.items():
        if service.model is None:
            services += _actors(config, facts.run, name, rooms["service"])
        else:
            pool = _service_engines(config, facts, name, rooms["engine"], threads)
            services += engine_specs(pool, slots.services[name], facts.run, take_ports)
    workers = _workers(config, facts, rooms["worker"])
    endpoint = "" if config.broker.endpoint else _own_endpoint(facts.run)
    return Plan(_broker(config, facts, rooms["broker"]), engines, workers, tuple(services), endpoint)


def _own_endpoint(run: Run) -> str:
    return f"ipc://{run.run_dir}/b"


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
    run = facts.run
    settings = {
        "endpoint": config.broker.endpoint or _own_endpoint(run),
        "keys": config.broker.keys,
        "secret": run.secret,
        "pools": [POLICY_POOL, "worker", *config.services],
        "max_pending": config.broker.max_pending,
        "sticky_cache_size": config.routing.sticky_cache_size,
        "record": config.routing.record,
        # Not the services': their sessions may be more than caches, and stay where they are.
        "routing": {POLICY_POOL: config.routing.thresholds},
        "incarnation": 1,
        "expected": [],
        "holders": f"{run.run_dir}/holders",
        "info": {
            "config": _told(config, facts).to_dict(),
            "run_id": run.run_id,
            "run_dir": run.run_dir,
            "launcher_pid": run.launcher_pid,
        },
    }
    return child("broker", "broker", entry, run, settings)


def _told(config: Config, facts: Facts) -> Config:
    """What every peer may know: models where they lie, and of services no environment or arguments, which may hold keys
    of the user's."""

    def of(model: ModelConfig, found: Model) -> ModelConfig:
        return model.model_copy(update={"path": found.path})

    services = {}
    for name, service in config.services.items():
        model = None if service.model is None else of(service.model, facts.service_models[name])
        services[name] = service.model_copy(update={"model": model, "env": {}, "args": {}})
    return config.model_copy(update={"model": of(config.model, facts.model), "services": services})


def _model_settings(model: ModelConfig, found: Model) -> dict[str, Any]:
    return {**model.model_dump(mode="json"), "path": found.path}


def _workers(config: Config, facts: Facts, entry: str) -> tuple[ChildSpec, ...]:
    shared = {
        "secret": facts.run.secret,
        "credits": config.worker.max_in_flight,
        "model": _model_settings(config.model, facts.model),
        "rollout": config.rollout.model_dump(mode="json"),
        "reward": config.reward.model_dump(mode="json"),
        "trace": config.trace.model_dump(mode="json"),
        "services": _services_told(config),
        "context_length": context_length(config, facts.model),
    }
    members = [Member("worker", f"worker-{index}", index) for index in range(config.worker.count)]
    rest = {"memory_limit": _worker_memory_limit(config, facts.machine)}
    return tuple(
        child(m.name, "worker", entry, facts.run, {**shared, "name": m.name, "epoch": m.epoch}, members=(m,), **rest)
        for m in members
    )


def _worker_memory_limit(config: Config, machine: Machine) -> int:
    """Bytes that one worker may hold; 0 = any."""
    limit = config.worker.memory_limit_gb
    if limit == "auto":
        return max(machine.memory // 2 // config.worker.count, LEAST_WORKER_BYTES)
    return _bytes(limit)


def _bytes(gigabytes: float | None) -> int:
    return 0 if gigabytes is None else int(gigabytes * 1e9)


def _policy(config: Config, facts: Facts, entry: str, threads: int) -> EnginePool:
    limit = config.routing.max_in_flight_per_engine
    return EnginePool(
        room="engine",
        pool=POLICY_POOL,
        entry=entry,
        engine=config.engine,
        model=_model_settings(config.model, facts.model),
        credits=config.engine.max_in_flight if limit is None else min(config.engine.max_in_flight, limit),
        seed=config.rollout.seed,
        threads=threads,
        python=python_of(config.engine),
    )


def _service_engines(config: Config, facts: Facts, name: str, entry: str, threads: int) -> EnginePool:
    service = config.services[name]
    assert service.model is not None and service.engine is not None
    return EnginePool(
        room="service",
        pool=name,
        entry=entry,
        engine=service.engine,
        model=_model_settings(service.model, facts.service_models[name]),
        credits=service.credits,
        seed=config.rollout.seed,
        threads=threads,
        python=python_of(service.engine, config.engine),
        env=service.env,
    )


def _services_told(config: Config) -> dict[str, dict[str, bool]]:
    """What callers must know: which there are, and which of them are pools of engines (`Services.configured`)."""
    return {name: {"model": service.model is not None} for name, service in config.services.items()}


def _actors(config: Config, run: Run, name: str, entry: str) -> tuple[ChildSpec, ...]:
    """Processes of a user's class."""
    service = config.services[name]
    shared = {
        "secret": run.secret,
        "pool": name,
        "credits": service.credits,
        "target": service.target,
        "args": service.args,
        "services": _services_told(config),
        "stop_timeout_s": config.launcher.stop_timeout_s,
    }
    env = {"CUDA_VISIBLE_DEVICES": "", **run.scratch, **service.env}
    members = [Member(name, f"{name}-{index}", index) for index in range(service.count)]
    rest = {"env": env, "memory_limit": _bytes(service.memory_limit_gb)}
    return tuple(
        child(m.name, "service", entry, run, {**shared, "name": m.name, "epoch": m.epoch}, members=(m,), **rest)
        for m in members
    )
