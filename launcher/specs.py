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
    of the launcher's environment. ``settings`` of all but the broker lack its endpoint, known once it serves.
    ``failed_starts``: how many lives in a row, right before this one, did not become ready.
    """

    name: str
    room: str
    entry: str
    settings: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    ports: EnginePorts | None = None
    failed_starts: int = 0

    @property
    def pool(self) -> str:
        """Whose members it hosts; "" for the broker."""
        return self.members[0].pool if self.members else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run."""

    broker: ChildSpec
    engines: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]
    services: tuple[ChildSpec, ...] = ()


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


def next_life(spec: ChildSpec, *, became_ready: bool) -> ChildSpec:
    """The same process once more: its members' next epoch. ``became_ready`` is about the life that ended."""
    members = tuple(replace(member, epoch=member.epoch + 1) for member in spec.members)
    changed = {"members": told(members)} if "members" in spec.settings else {"epoch": members[0].epoch}
    failed = 0 if became_ready else spec.failed_starts + 1
    return replace(spec, members=members, settings={**spec.settings, **changed}, failed_starts=failed)
