"""Who holds calls to a pool back, and whose turn it is to change its members. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zagent.broker.pool import Caller, Pool
from zagent.errors import StateError


class Gates:
    """What callers hold of pools: gates, which any number of them keep closed, and turns, which one at a time has.

    Callers say in their hello what they hold (`Hello`), so that a broker that is new, or had forgotten them, knows it
    before it routes anything.

    Args:
        remember: called with the nonces of all who hold something, whenever they are others than before.
    """

    def __init__(self, pools: Mapping[str, Pool], remember: Callable[[list[bytes]], None] | None) -> None:
        self._pools, self._remember = pools, remember
        self._holders: list[bytes] = []

    def close(self, pool: Pool, caller: Caller) -> None:
        """Members of ``pool`` get nothing new until the caller opens the gate, or is gone."""
        pool.gate(caller.nonce, closed=True)
        self._changed()

    def open(self, pool: Pool, caller: Caller) -> bool:
        """Nothing is held back any more for that caller's sake; whether the gate is open now, and was not before."""
        opened = pool.gate(caller.nonce, closed=False)
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

    def hello(self, caller: Caller, facts: Mapping[str, Any]) -> None:
        """A caller comes with what it holds; names of pools that are none are nothing it could hold."""
        for pool in self._named(facts.get("gates")):
            self.close(pool, caller)
        for pool in self._named(facts.get("turns")):
            if pool.turn is None:
                self.take_turn(pool, caller)

    def gone(self, caller: Caller) -> list[Pool]:
        """That caller holds nothing any more; the pools whose gate it had closed are still to be opened."""
        for pool in self._pools.values():
            self.end_turn(pool, caller)
        return [pool for pool in self._pools.values() if caller.nonce in pool.gates]

    def _named(self, names: Any) -> list[Pool]:
        return [pool for pool in self._pools.values() if isinstance(names, list) and pool.name in names]

    def _changed(self) -> None:
        held = {nonce for pool in self._pools.values() for nonce in pool.gates}
        held |= {pool.turn for pool in self._pools.values() if pool.turn is not None}
        if sorted(held) != self._holders:
            self._holders = sorted(held)
            if self._remember is not None:
                self._remember(self._holders)
