"""The simulated prefix cache: which whole blocks of which prefixes the engine still holds."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

#: Tokens per block; a prefix is found and kept in whole blocks only.
BLOCK = 64

Words = npt.NDArray[np.uint64]


class PrefixHasher:
    """Names every block-long prefix of a sequence by 64 bits: one multiply and one running sum.

    The weights come from a fixed seed, so that a run repeats exactly. Tables grow with the longest sequence.
    """

    def __init__(self) -> None:
        self._grow(1024)

    def keys(self, ids: np.ndarray) -> list[int]:
        """One key per whole block of ``ids`` (int32 [n]); it stands for all ids up to that block's end."""
        count = ids.size // BLOCK
        if count > len(self._weights):
            self._grow(count * BLOCK)
        if not count:
            return []
        blocks = ids[: count * BLOCK].astype(np.uint64).reshape(count, BLOCK)
        sums = np.einsum("ij,ij->i", blocks, self._weights[:count])
        keys: list[int] = (sums.cumsum() + self._lengths[:count]).tolist()
        return keys

    def _grow(self, length: int) -> None:
        size = 1 << (length - 1).bit_length()
        words: Words = np.random.PCG64(0).random_raw(size + size // BLOCK)
        self._lengths = words[::BLOCK][: size // BLOCK]  # tells a prefix from the same plus a block of zeros
        self._weights = np.random.PCG64(1).random_raw(size).reshape(-1, BLOCK)


class PrefixCache:
    """Least recently used blocks go first, and a prefix's end before its beginning.

    Each use moves a whole prefix to the young end of one queue, last block first. A block is therefore always younger
    than every block that continues it, and the oldest block is the end of some prefix (a leaf of the radix tree).
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return len(self._blocks) * BLOCK

    def cached_tokens(self, keys: list[int]) -> int:
        """Tokens of the longest prefix (`PrefixHasher.keys`) that is held."""
        return self._held(keys) * BLOCK

    def insert(self, keys: list[int]) -> None:
        """Hold the prefix, as far as it fits, as the most recently used one."""
        blocks = self._blocks
        keys = keys[: self._capacity]
        held = self._held(keys)
        for key in reversed(keys[held:]):
            blocks[key] = None
        for key in reversed(keys[:held]):
            blocks.move_to_end(key)
        for _ in range(len(blocks) - self._capacity):
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def _held(self, keys: list[int]) -> int:
        blocks = self._blocks
        for count, key in enumerate(keys):
            if key not in blocks:
                return count
        return len(keys)
