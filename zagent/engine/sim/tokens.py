"""Invented tokens: a linear hash over all preceding ids that a continuation can pick up anywhere.

A hash chained per token would take one Python step per token. Here the state is linear, so a prompt is folded by a few
dot products and an answer of any length is one matrix product. All values are integers modulo a prime p, the largest
below the vocabulary size:

* The state h is `dim` polynomial rolling hashes (Rabin fingerprints) of the ids, with different bases:
  ``h <- bases * h + r``, where ``r = scale[i] * (id - pad[i])`` for the id at position i, and p^dim >= 2^64.
* The next token is the one with ``r = readout . h``. So while the engine's own tokens are appended, h follows
  ``h <- step @ h`` with ``step = diag(bases) + outer(1, readout)``, whoever computes it: token k of an answer is
  ``readout @ step^k . h``, one row of a table.
* `readout` is chosen so that `step` has distinct eigenvalues apart from the bases and from 0: then different states
  give different continuations within `dim` tokens.
* `pad` and `scale` are pseudo-random per position: they make the tokens look uniform, and a moved id count as another.

Ids beyond p, and the end token, which is never drawn, share a residue with another id; such ids also add a second
direction to the state (`Alphabet`), so that any two prompts that differ in one id differ in state. All float64 sums
stay below 2^53 and are therefore exact and the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

#: Matrix elements per product: fewer than 2^13 terms below 2^40 sum to less than 2^53, and OpenBLAS starts threads (no
#: gain at such sizes, and in the way of other engines) only from 9 216 elements on.
CHUNK = 8192


class State(NamedTuple):
    """What the tokens after ``position`` ids depend on. ``hashes`` is float64 [dim], integers in [0, p)."""

    position: int
    hashes: Floats


class TokenSource:
    """Tokens and log-probabilities as a function of (seed, request seed, all preceding ids).

    ``vocab_size`` is between 32 and 2^20. Sources are immutable but for tables that grow with the longest sequence
    (about 270 bytes a position); `token_source` shares them among the engines of one process.
    """

    def __init__(self, vocab_size: int, eos_token_id: int, seed: int) -> None:
        self.prime = p = _prime_below(vocab_size)
        self._seed = seed
        dim = math.ceil(64 / math.log2(p))
        self._chunk = CHUNK // dim
        self._alphabet = Alphabet(vocab_size, eos_token_id, p, mark=_field(words(seed, "mark", dim), p))
        roots = _distinct(1, p, 2 * dim, words(seed, "roots"))
        self._bases = np.array(roots[:dim], np.int64)
        self._readouts = np.empty((3, dim), np.int64)
        self._readouts[0] = _place_eigenvalues(roots[:dim], roots[dim:], p)
        self._readouts[1:] = _field(words(seed, "readouts", 2 * dim), p).reshape(2, dim)
        self._log_table = np.log((np.arange(p) + 0.5) / p).astype(np.float32)
        self._grow(1024)

    def state(self, ids: np.ndarray, request_seed: int) -> State:
        """The state after ``ids`` (int32 [n], inside the vocabulary)."""
        n, p = ids.size, self.prime
        if n >= self._size:
            self._grow(n + 1)
        total = self._offsets[n] + self._start(request_seed) + self._alphabet.corrections(ids, self._weights)
        for low in range(0, n, self._chunk):
            part = ids[low : low + self._chunk].astype(np.float64)
            total += (self._weights[:, low : low + part.size] @ part).astype(np.int64)
        return State(n, (total % p * self._powers[n] % p).astype(np.float64))

    def tokens(self, state: State, first: int, last: int) -> npt.NDArray[np.int32]:
        """Tokens ``first`` to ``last`` (exclusive) after ``state``: int32, never the end token."""
        return self._alphabet.ids(self._values(0, state, first, last))

    def log_probs(self, state: State, first: int, last: int) -> npt.NDArray[np.float32]:
        """Their log-probabilities: float32, finite, negative, -1 on average (that of a uniform probability)."""
        return self._log_table[self._values(1, state, first, last)]

    def chances(self, state: State, first: int, last: int) -> Floats:
        """A uniform number in [0, 1) for each of the same positions, in steps of 1/p^2; decides where answers end."""
        coarse, fine = self._values(2, state, first, last), self._values(0, state, first, last)
        result: Floats = (coarse * self.prime + fine) / float(self.prime**2)
        return result

    def _values(self, which: int, state: State, first: int, last: int) -> Ints:
        """``pad + readouts[which] @ step^k . hashes / scale`` for k in [first, last): int64, in [0, p).

        The product alone repeats every p - 1 tokens, as powers of eigenvalues do; pad and scale do not.
        """
        end = state.position + last
        if end > self._size:
            self._grow(end)
        rows = self._rows[which]
        parts = [rows[low : min(low + self._chunk, last)] @ state.hashes for low in range(first, last, self._chunk)]
        values = (parts[0] if len(parts) == 1 else np.concatenate([np.empty(0), *parts])).astype(np.int64)
        values %= self.prime
        values *= self._unscale[end - values.size : end]
        values += self._pads[which, end - values.size : end]
        values %= self.prime
        return values

    def _start(self, request_seed: int) -> Ints:
        return _beginning(self._seed, request_seed, self._bases.size, self.prime)

    def _grow(self, length: int) -> None:
        """Tables for sequences of up to ``length`` tokens, rounded up to a power of two."""
        size, p = 1 << (length - 1).bit_length(), self.prime
        self._pads = np.stack([_field(counters(size, key), p) for key in words(self._seed, "pads", 3)])
        scale = 1 + _field(counters(size, words(self._seed, "scale")[0]), p - 1)
        self._unscale = _power(scale, p - 2, p)  # Fermat: the inverse
        inverses = _power(self._bases, p - 2, p)
        self._powers = _geometric(self._bases, size, p)
        weights = _geometric(inverses, size, p) * inverses % p * scale[:, None] % p
        before = np.zeros((size, self._bases.size), np.int64)
        before[1:] = np.cumsum(weights * self._pads[0][:, None] % p, axis=0)[:-1]
        self._offsets = -before % p
        self._weights = np.ascontiguousarray(weights.T, np.float64)
        step = (np.diag(self._bases) + self._readouts[0]) % p
        self._rows = [_orbit(readout, step, size, p).astype(np.float64) for readout in self._readouts]
        self._size = size


@lru_cache(maxsize=4)
def token_source(vocab_size: int, eos_token_id: int, seed: int) -> TokenSource:
    """The process's shared source for these three."""
    return TokenSource(vocab_size, eos_token_id, seed)


@lru_cache(maxsize=1024)
def _beginning(seed: int, request_seed: int, dim: int, p: int) -> Ints:
    """What a state begins with, int64 [dim]; not to be changed."""
    return _field(words(seed, f"request {request_seed}", dim), p)


class Alphabet:
    """Ids as residues modulo ``prime`` and back.

    A residue is its own id, except that the end token is never written: the last id of the vocabulary stands in for it.
    The end token itself and ids from ``prime`` on are *marked*, as their residue is another id's too: they add ``mark``
    (int64 [dim]) to every component of the state, the end token twice.
    """

    def __init__(self, vocab_size: int, eos_token_id: int, prime: int, mark: Ints) -> None:
        self._prime = prime
        self._eos = eos_token_id
        self._stand_in = vocab_size - 1 if eos_token_id < prime else -1
        instead = np.full_like(mark, eos_token_id - self._stand_in)
        self._extra = np.stack([mark, 2 * mark, instead], axis=1) % prime

    def ids(self, residues: Ints) -> npt.NDArray[np.int32]:
        ids = residues.astype(np.int32)
        if self._stand_in >= 0:
            ids[ids == self._eos] = self._stand_in
        return ids

    def corrections(self, ids: np.ndarray, weights: Floats) -> Ints | int:
        """What marked ids and stand-ins add to the plain weighted sum of ``ids``: int64 [dim], or 0."""
        marked = ids >= self._prime
        marked |= ids == self._eos
        if not marked.any():
            return 0
        found = np.flatnonzero(marked)
        odd = ids[found]
        extra = self._extra[:, (odd == self._eos) + 2 * (odd == self._stand_in)]
        total: Ints = (weights[:, found].astype(np.int64) * extra).sum(axis=1)
        return total


def _place_eigenvalues(bases: list[int], wanted: list[int], p: int) -> list[int]:
    """The row c for which ``diag(bases) + outer(1, c)`` has the eigenvalues ``wanted``, modulo p.

    From det(xI - D - 1c') = prod(x - base) * (1 - sum c_m / (x - base_m)): c_m is the negative residue at base_m.
    """
    row = []
    for base in bases:
        above = math.prod(base - w for w in wanted)
        below = math.prod(base - other for other in bases if other != base)
        row.append(-above * pow(below, -1, p) % p)
    return row


def _orbit(row: Ints, step: Ints, count: int, p: int) -> Ints:
    """``row @ step^k`` for k in [0, count), a power of two: int64 [count, dim], by doubling."""
    rows = row[None, :] % p
    while rows.shape[0] < count:
        rows = np.concatenate([rows, rows @ step % p])
        step = step @ step % p
    return rows


def _geometric(ratios: Ints, count: int, p: int) -> Ints:
    """``ratios^k`` for k in [0, count), a power of two: int64 [count, dim], by doubling."""
    powers, factor = np.ones((1, ratios.size), np.int64), ratios
    while powers.shape[0] < count:
        powers = np.concatenate([powers, powers * factor % p])
        factor = factor * factor % p
    return powers


def _power(base: Ints, exponent: int, p: int) -> Ints:
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base % p
        base = base * base % p
        exponent >>= 1
    return result


def _prime_below(bound: int) -> int:
    return next(n for n in range(bound - 1, 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def words(seed: int, purpose: str, count: int = 1) -> Words:
    """``count`` 64-bit words, a hash of the other two."""
    text = f"{seed} {purpose}".encode()
    return np.frombuffer(hashlib.shake_128(text).digest(8 * count), "<u8")


def counters(count: int, key: Any) -> Words:
    """``count`` pseudo-random 64-bit words: splitmix64 (Steele et al. 2014), the same for any count and platform."""
    return mixed((np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + key)


def mixed(z: Words) -> Words:
    """Each word of ``z`` sent to another one, in which every bit depends on every bit (splitmix64's last step)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Words = z ^ (z >> np.uint64(31))
    return result


def _field(hashes: Words, p: int) -> Ints:
    return (hashes % np.uint64(p)).astype(np.int64)


def _distinct(low: int, high: int, count: int, key: Words) -> list[int]:
    """``count`` different ints from [low, high), in a pseudo-random order."""
    order = np.argsort(counters(high - low, key[0]), kind="stable")
    return [low + int(i) for i in order[:count]]
