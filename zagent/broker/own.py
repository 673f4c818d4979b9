"""The broker's own methods: what is asked of it by calls to the pool `BROKER`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zagent.broker.dispatch import Dispatch
from zagent.broker.gates import REASONS, Gates
from zagent.broker.leases import Frames
from zagent.broker.pool import Caller, Member, Pool, State
from zagent.broker.presence import Presence
from zagent.broker.roster import Roster
from zagent.errors import InvalidRequest, UnknownMethod
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import LAST_VERSION

#: Largest argument, in bytes: they take names, and a path.
ARGUMENT_MAX = 16_384


class Own:
    """Answers calls by method name; each method takes (argument, caller, now)."""

    def __init__(
        self,
        roster: Roster,
        pools: Mapping[str, Pool],
        dispatch: Dispatch,
        presence: Presence,
        counters: Mapping[str, int],
        *,
        gates: Gates,
        incarnation: int,
    ) -> None:
        self._roster, self._pools, self._dispatch, self._presence = roster, pools, dispatch, presence
        self._counters, self._incarnation = counters, incarnation
        self._methods: dict[str, Callable[[Any, Caller, float], Any]] = {
            "status": self._status,
            "drain": lambda argument, caller, now: presence.drain(self._named(argument), now),
            "remove": lambda argument, caller, now: presence.remove(self._named(argument), now),
            "close_gate": lambda argument, caller, now: gates.close(*self._gate(argument, caller)),
            "open_gate": lambda argument, caller, now: presence.open_gate(*self._gate(argument, caller), now),
            "take_turn": lambda argument, caller, now: gates.take_turn(self._pool(argument), caller),
            "end_turn": lambda argument, caller, now: gates.end_turn(self._pool(argument), caller),
            "set_version": self._set_version,
        }

    def answer(self, method: str, argument: Frames, caller: Caller, now: float) -> Frames:
        """The body of the reply. Raises `ZagentError`."""
        if method not in self._methods:
            raise UnknownMethod(f"the broker has no method {method!r}, only {sorted(self._methods)}")
        return encode_body(self._methods[method](decode_body(argument, ARGUMENT_MAX), caller, now))

    def _status(self, argument: Any, caller: Caller, now: float) -> dict[str, Any]:
        return {
            "pools": self._roster.status(),
            "versions": {name: pool.version for name, pool in self._pools.items()},
            "weights": {name: pool.weights for name, pool in self._pools.items()},
            "gated": sorted(name for name, pool in self._pools.items() if pool.holds_back),
            "sessions": len(self._dispatch.sessions),
            "pending": self._dispatch.pending,
            "callers": len(self._roster.callers),
            "incarnation": self._incarnation,
            "recovering": self._dispatch.recovering,
            "counters": dict(self._counters),
        }

    def _set_version(self, argument: Any, caller: Caller, now: float) -> None:
        """[pool, version, directory]: there are such weights, whoever of the members has them yet."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [str, int, str]:
            raise InvalidRequest("set_version takes [pool, version, directory]")
        pool, version, weights = argument
        if not 0 <= version <= LAST_VERSION:
            raise InvalidRequest(f"version {version} is none: versions are 0 to {LAST_VERSION}")
        self._presence.set_version(self._pool(pool), version, weights, now)

    def _gate(self, argument: Any, caller: Caller) -> tuple[Pool, Caller, str]:
        """[pool, reason]."""
        if not isinstance(argument, list) or len(argument) != 2 or argument[1] not in REASONS:
            raise InvalidRequest(f"gates take [pool, reason], the reason one of {', '.join(REASONS)}")
        return self._pool(argument[0]), caller, argument[1]

    def _pool(self, name: Any) -> Pool:
        if not isinstance(name, str) or name not in self._pools:
            raise InvalidRequest(f"no pool {name!r} here, only {sorted(self._pools)}")
        return self._pools[name]

    def _named(self, argument: Any) -> Member:
        """[pool, name], or [pool, name, epoch]: in that life and no other."""
        pool, name, epoch = [*argument, None, None, None][:3] if isinstance(argument, list) else (None, None, None)
        member = self._roster.member(str(pool), str(name))
        if member is None or member.state is State.DEAD or epoch not in (None, member.epoch):
            raise InvalidRequest(f"no live member {name!r} in pool {pool!r}")
        return member
