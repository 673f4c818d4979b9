"""The processes of one pool of engines: the policy's, or a service's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.ports import EnginePorts
from launcher.slots import Slots
from launcher.specs import ChildSpec, Member, Run, child, told
from zagent.config import EngineConfig

#: The pool of the policy's engines.
POLICY_POOL = "engine"


@dataclass(frozen=True, slots=True)
class EnginePool:
    """What the engines of a pool have in common. ``room`` says what becomes of the run when they die, ``model`` is the
    section with its path resolved, ``threads`` those of each process that computes, ``python`` as of `ChildSpec`,
    ``env`` the user's."""

    room: str
    pool: str
    entry: str
    engine: EngineConfig
    model: Mapping[str, Any]
    credits: int
    seed: int
    threads: int
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def python_of(engine: EngineConfig, policy: EngineConfig | None = None) -> str:
    """The interpreter that ``engine`` runs under, for a service's by default the ``policy``'s; "" = the launcher's
    own."""
    return engine.python or (policy.python if policy is not None else None) or ""


def engine_specs(
    pool: EnginePool, slots: Slots, run: Run, take_ports: Callable[[], EnginePorts]
) -> tuple[ChildSpec, ...]:
    """One process per slot; simulated engines share some. ``take_ports`` gives ports to one more SGLang engine."""
    members = [Member(pool.pool, f"{pool.pool}-{index}", index) for index in range(len(slots))]
    if pool.engine.kind == "sim":
        return _sim(pool, members, run)
    return tuple(_sglang(pool, m, gpus, run, take_ports()) for m, gpus in zip(members, slots, strict=True))


def _settings(pool: EnginePool, members: tuple[Member, ...], run: Run, ports: EnginePorts) -> dict[str, Any]:
    return {
        "secret": run.secret,
        "pool": pool.pool,
        "members": told(members),
        "credits": pool.credits,
        "model": dict(pool.model),
        "engine": pool.engine.model_dump(mode="json"),
        "seed": pool.seed + members[0].index,
        "nccl_port": ports.nccl_port,
        "port": ports.port,
    }


def _sglang(pool: EnginePool, member: Member, gpus: tuple[str, ...], run: Run, ports: EnginePorts) -> ChildSpec:
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(pool.threads),
        **run.scratch,  # SGLang never removes its ipc sockets, and needs short paths for them
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # under torchrun an engine would wait for the trainer's store
        **pool.env,
    }
    settings = _settings(pool, (member,), run, ports)
    rest: dict[str, Any] = {"env": env, "members": (member,), "ports": ports, "python": pool.python}
    return child(member.name, pool.room, pool.entry, run, settings, **rest)


def _sim(pool: EnginePool, members: list[Member], run: Run) -> tuple[ChildSpec, ...]:
    width = pool.engine.sim.per_process
    groups = [tuple(members[first : first + width]) for first in range(0, len(members), width)]
    made: list[ChildSpec] = []
    for group in groups:
        name = group[0].name if len(group) == 1 else f"{group[0].name}-to-{group[-1].index}"
        settings = _settings(pool, group, run, EnginePorts(0, 0))
        rest: dict[str, Any] = {"env": pool.env, "members": group, "python": pool.python}
        made.append(child(name, pool.room, pool.entry, run, settings, **rest))
    return tuple(made)
