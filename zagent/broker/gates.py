"""Who holds calls to a pool back, and whose turn it is to change its members. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zagent.broker.pool import Caller, Pool
from zagent.errors import StateError

#: Why a caller may keep a gate closed: it updates the members, has broken off what ran, or has made them sleep.
ASLEEP = "asleep"
REASONS = ("update", "aborted", ASLEEP)


class Gates:
    """What callers hold of pools: gates, which any number of them keep closed, and turns, which one at a time has.

    Callers say in their hello what they hold (`Hello`), so that a broker that is new, or had forgotten them, knows it
    before it routes anything. But who made members sleep may not know that others have woken them up: members say
    themselves whether they sleep.

    Args:
        remember: called with the nonces of all who hold something, whenever they are others than before.
    """

    def __init__(self, pools: Mapping[str, Pool], remember: Callable[[list[bytes]], None] | None) -> None:
        self._pools, self._remember = pools, remember
        self._holders: list[bytes] = []

    def close(self, pool: Pool, caller: Caller, reason: str) -> None:
        """Members of ``pool`` get nothing new until the caller opens the gate, or is gone."""
        self._gate(pool, pool.gates | {(caller.nonce, reason)})

    def open(self, pool: Pool, caller: Caller, reason: str) -> bool:
        """That caller has that reason no more; whether the gate is open now, and was not before."""
        return self._gate(pool, pool.gates - {(caller.nonce, reason)})

    def woken(self, pool: Pool) -> bool:
        """Where none of its members sleeps, nobody's gate is closed for that, whoever has woken them up; as `open`."""
        return not pool.sleeps and self._gate(pool, {gate for gate in pool.gates if gate[1] != ASLEEP})

    def _gate(self, pool: Pool, gates: Iterable[tuple[bytes, str]]) -> bool:
        opened = pool.gate(gates)
        self._changed()
        return opened

    def take_turn(self, pool: Pool, caller: Caller) -> None:
        """Nobody else changes the members of ``pool`` until the caller ends its turn, or is gone. Raises `StateError`
        where it is another's."""
        if pool.turn not in (None, caller.nonce):
            raise StateError(
                f"another trainer is updating the members of pool {pool.name!r}, or makes them sleep or wake up: "
                "one at a time"
            )
        pool.turn = caller.nonce
        self._changed()

    def end_turn(self, pool: Pool, caller: Caller) -> None:
        """It may be another's, if it was this caller's."""
        if pool.turn == caller.nonce:
            pool.turn = None
            self._changed()

    def hello(self, caller: Caller, facts: Mapping[str, Any], *, all_here: bool) -> None:
        """A caller comes with what it holds; what is no pool, or no reason, is nothing it could hold. ``all_here``: all
        members are, so that it is known whether some sleep."""
        gates, turns = facts.get("gates"), facts.get("turns")
        for pool in self._pools.values():
            for reason in REASONS:
                outdated = reason == ASLEEP and all_here and not pool.sleeps
                if isinstance(gates, list) and [pool.name, reason] in gates and not outdated:
                    self.close(pool, caller, reason)
            if isinstance(turns, list) and pool.name in turns and pool.turn is None:
                self.take_turn(pool, caller)

    def gone(self, caller: Caller) -> list[Pool]:
        """That caller holds nothing any more; the pools whose gate is open for that."""
        pools = self._pools.values()
        for pool in pools:
            self.end_turn(pool, caller)
        return [pool for pool in pools if self._gate(pool, {gate for gate in pool.gates if gate[0] != caller.nonce})]

    def _changed(self) -> None:
        held = {nonce for pool in self._pools.values() for nonce, _ in pool.gates}
        held |= {pool.turn for pool in self._pools.values() if pool.turn is not None}
        if sorted(held) != self._holders:
            self._holders = sorted(held)
            if self._remember is not None:
                self._remember(self._holders)
