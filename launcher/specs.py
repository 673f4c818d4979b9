"""What a plan is made of: processes to start, and the members of the broker's pools that they host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher import processes
from launcher.ports import EnginePorts


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
    of the launcher's environment, under the interpreter ``python`` ("" = the launcher's own). ``settings`` of all but
    the broker lack its endpoint, known once it serves.
    ``memory_limit``: resident bytes at which it ends itself; 0 = none. ``restarted_at``: when it was to be started
    again, each time (s); ``failed_starts``: how many starts in a row, right before this one, did not become ready.
    """

    name: str
    room: str
    entry: str
    settings: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    ports: EnginePorts | None = None
    python: str = ""
    memory_limit: int = 0
    restarted_at: tuple[float, ...] = ()
    failed_starts: int = 0

    @property
    def life(self) -> int:
        """Counts its starts, from 1."""
        return 1 + len(self.restarted_at)

    @property
    def pool(self) -> str:
        """Whose members it hosts; "" for the broker."""
        return self.members[0].pool if self.members else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run. ``endpoint`` is the broker's where it is known before the broker serves: in the run's own
    directory, where nobody else can be; else ""."""

    broker: ChildSpec
    engines: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]
    services: tuple[ChildSpec, ...] = ()
    endpoint: str = ""


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

    @property
    def scratch(self) -> dict[str, str]:
        """Environment of children that may leave temporary files: below the run directory they go with the run. What
        torch compiled, which lies there by default, is worth keeping."""
        return {"TMPDIR": self.temporary, "TORCHINDUCTOR_CACHE_DIR": self.inductor_cache}


def child(name: str, room: str, entry: str, run: Run, settings: Mapping[str, Any], **rest: Any) -> ChildSpec:
    """A process of ``run``, which its environment tells."""
    env = {**rest.pop("env", {}), processes.RUN_ID_VARIABLE: run.run_id, processes.CHILD_VARIABLE: name}
    return ChildSpec(name, room, entry, settings, env, **rest)


def told(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Members as their process is told about them."""
    return [{"name": m.name, "index": m.index, "epoch": m.epoch} for m in members]


@dataclass(frozen=True, slots=True)
class End:
    """How a life ended: at ``at`` (s), after it ``became_ready`` or before, and by itself (``crashed``) or not."""

    at: float
    became_ready: bool
    crashed: bool

    def failed_starts(self, before: int) -> int:
        """In a row, after ``before`` ones. A start that was ended from outside says nothing about the next."""
        return 0 if self.became_ready else before + self.crashed


def next_life(spec: ChildSpec, end: End) -> ChildSpec:
    """The same process once more after ``end``: its members' next epoch, the broker's next incarnation."""
    life = spec.life + 1
    members = tuple(replace(member, epoch=life) for member in spec.members)
    return replace(
        spec,
        members=members,
        settings={**spec.settings, **_numbered(spec, members, life)},
        restarted_at=(*spec.restarted_at, end.at),
        failed_starts=end.failed_starts(spec.failed_starts),
    )


def _numbered(spec: ChildSpec, members: Sequence[Member], life: int) -> dict[str, Any]:
    """Its life's number, where its settings say it."""
    if not members:
        return {"incarnation": life}
    return {"members": told(members)} if "members" in spec.settings else {"epoch": life}


def with_ports(spec: ChildSpec, ports: EnginePorts) -> ChildSpec:
    """An engine with other ports: the former life's may still be in use."""
    settings = {**spec.settings, "nccl_port": ports.nccl_port, "port": ports.port}
    return replace(spec, ports=ports, settings=settings)
