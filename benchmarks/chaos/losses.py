"""Kills, and how long it took until each was known and its place taken again: read off the broker's status. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.script import ROOMS, Room


@dataclass
class Loss:
    """A process that was killed at ``at`` (monotonic s), with ``in_flight`` calls aboard as far as the status told;
    ``counts``: that status was recent, and there were some. ``epoch`` is of a member, 0 for the broker."""

    room: Room
    name: str
    pid: int
    epoch: int
    at: float
    in_flight: int
    counts: bool
    known_at: float | None = None
    back_at: float | None = None


@dataclass
class Stop:
    """A process that was stopped ``at`` and went on at ``until`` (monotonic s)."""

    name: str
    pid: int
    at: float
    until: float = float("inf")


@dataclass
class Losses:
    """All of a run. Fed with whatever is observed, in order of time."""

    all: list[Loss] = field(default_factory=list)

    def add(self, loss: Loss) -> None:
        self.all.append(loss)

    def note_status(self, asked_at: float, answered_at: float, status: Mapping[str, Any]) -> None:
        """The broker said so. A member is back once it is ready in a later life; a broker, when it answers what was
        asked after its predecessor's death."""
        for loss in self.open():
            if loss.room != "broker":
                self._note_member(loss, answered_at, status["pools"][loss.room].get(loss.name))
            elif asked_at > loss.at:
                loss.back_at = answered_at

    def note_broker(self, at: float, pid: int) -> None:
        """The broker's process was seen: a new one means that the launcher knows the end of the one before."""
        for loss in self.open():
            if loss.room == "broker" and loss.known_at is None and pid != loss.pid:
                loss.known_at = at

    def open(self) -> list[Loss]:
        """Places that are not taken again yet."""
        return [loss for loss in self.all if loss.back_at is None]

    @staticmethod
    def _note_member(loss: Loss, at: float, member: Mapping[str, Any] | None) -> None:
        if member is not None and member["epoch"] == loss.epoch and member["state"] != "dead":
            return
        if loss.known_at is None:
            loss.known_at = at
        if member is not None and member["epoch"] > loss.epoch and member["state"] == "ready":
            loss.back_at = at

    def counted(self) -> dict[str, int]:
        """Kills with work in flight, by room."""
        return {room: sum(loss.counts for loss in self.all if loss.room == room) for room in ROOMS}


@dataclass(frozen=True)
class Recovery:
    """Of one room's kills: how many, how many of them with work in flight, and seconds (median, worst) until they were
    known and until the place was taken again; None where nobody saw it."""

    room: Room
    kills: int
    counted: int
    known: tuple[float, float] | None
    back: tuple[float, float] | None


def recoveries(losses: Iterable[Loss]) -> list[Recovery]:
    """One per room that lost somebody."""
    found = list(losses)
    by_room = {room: [loss for loss in found if loss.room == room] for room in ROOMS}
    return [_recovery(room, lost) for room, lost in by_room.items() if lost]


def _recovery(room: Room, losses: Sequence[Loss]) -> Recovery:
    known = [loss.known_at - loss.at for loss in losses if loss.known_at is not None]
    back = [loss.back_at - loss.at for loss in losses if loss.back_at is not None]
    counted = sum(loss.counts for loss in losses)
    return Recovery(room, len(losses), counted, _middle_and_worst(known), _middle_and_worst(back))


def _middle_and_worst(values: Sequence[float]) -> tuple[float, float] | None:
    return (statistics.median(values), max(values)) if values else None
