"""An engine's KV memory in blocks: what running calls hold, and what is kept of former ones until it is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

#: Tokens per block. A prefix is found in whole blocks.
BLOCK = 64


class KvMemory:
    """Blocks by key; one key stands for all tokens up to that block's end. A block that several calls hold counts once.
    Blocks that nobody holds go least recently used first, and a prefix's end before its beginning."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[int] = Counter()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Blocks that running calls hold."""
        return len(self._held)

    def known(self, keys: Sequence[int]) -> int:
        """Blocks of the longest prefix of ``keys`` that is here."""
        for count, key in enumerate(keys):
            if key not in self._held and key not in self._kept:
                return count
        return len(keys)

    def fits(self, keys: Sequence[int], reserve: int = 0) -> bool:
        """Whether a call could hold ``keys``, and ``reserve`` blocks stay."""
        more = sum(key not in self._held for key in keys)
        return len(self._held) + more + reserve <= self.capacity

    def hold(self, keys: Sequence[int]) -> None:
        """For a running call. They must fit."""
        for key in keys:
            self._kept.pop(key, None)
            self._held[key] += 1
        while len(self._held) + len(self._kept) > self.capacity:
            self._kept.popitem(last=False)

    def release(self, keys: Sequence[int]) -> None:
        """The call does not run any more; its blocks are kept as the most recently used."""
        for key in reversed(keys):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._kept[key] = None
