"""Invented routing of a mixture-of-experts model: which experts each token of a sequence goes through."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from zagent.engine.sim.tokens import counters, mixed, words


class ExpertRouter:
    """Experts as a function of (seed, all ids up to a token, layer).

    A token's experts therefore stay what they are however the sequence is continued, and whoever computes them.
    ``experts_per_token`` <= ``experts`` <= 2^15.
    """

    def __init__(self, layers: int, experts: int, experts_per_token: int, seed: int) -> None:
        self._experts = experts
        self._position_key = words(seed, "experts by position")[0]
        self._layer_keys = words(seed, "experts by layer", layers)
        self._slots = np.arange(experts_per_token, dtype=np.int32)
        # Steps that visit every expert before they come to one again, so that a token's are distinct.
        self._steps = np.array([step for step in range(experts) if math.gcd(step, experts) == 1], np.int32)

    def routed(self, ids: np.ndarray) -> npt.NDArray[np.int16]:
        """Experts of each of ``ids`` (int32 [n], not negative): int16 [n, layers, experts per token], distinct in each
        layer."""
        own = mixed(counters(ids.size, self._position_key) + ids.astype(np.uint64))
        hashes = mixed(np.cumsum(own, dtype=np.uint64)[:, None] ^ self._layer_keys)
        first = (hashes % np.uint64(self._experts)).astype(np.int32)
        step = self._steps[(hashes >> np.uint64(32)) % np.uint64(self._steps.size)]
        found: npt.NDArray[np.int16] = np.empty((*first.shape, self._slots.size), np.int16)
        found[:] = (first[..., None] + step[..., None] * self._slots) % np.int32(self._experts)
        return found
