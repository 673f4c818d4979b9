"""Unit tests: the simulated prefix cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zagent.engine.sim.cache import BLOCK, PrefixCache, PrefixHasher

HASHER = PrefixHasher()


def keys(*blocks: int) -> list[int]:
    """Keys of a sequence of blocks, each filled with one id."""
    return HASHER.keys(np.repeat(np.array(blocks, np.int32), BLOCK))


def test_keys_count_whole_blocks_only():
    """A partial block has no key."""
    assert [len(HASHER.keys(np.zeros(n, np.int32))) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]


def test_keys_name_prefixes_not_blocks():
    """Sequences share keys exactly up to the first block that differs, and a block of zeros counts."""
    one, other = keys(1, 2, 3, 0), keys(1, 2, 4, 0)
    assert one[:2] == other[:2]
    assert len({*one, *other}) == 6
    assert len(set(keys(0, 0, 0))) == 3


def test_keys_do_not_depend_on_what_was_hashed_before():
    """Growing the tables changes no key."""
    ids = np.arange(2000, dtype=np.int32)
    short = PrefixHasher().keys(ids[:640])
    assert PrefixHasher().keys(ids)[:10] == short
    assert HASHER.keys(np.zeros(100_000, np.int32))[:1] == keys(0)


def test_the_longest_held_prefix_is_found():
    """Lookup stops at the first missing block."""
    cache = PrefixCache(1000 * BLOCK)
    cache.insert(keys(1, 2, 3))
    assert cache.cached_tokens(keys(1, 2, 9, 3)) == 2 * BLOCK
    assert cache.cached_tokens(keys(2, 3)) == 0


def test_eviction_takes_the_least_recently_used_end_first():
    """An old prefix loses its last block first, a used one stays whole."""
    cache = PrefixCache(4 * BLOCK)
    cache.insert(keys(1, 2))
    cache.insert(keys(5, 6))
    cache.insert(keys(1, 2))
    cache.insert(keys(7))
    assert [cache.cached_tokens(keys(*prefix)) for prefix in ((1, 2), (5, 6), (7,))] == [128, 64, 64]


def test_a_prefix_beyond_the_capacity_keeps_its_beginning():
    """Of a sequence larger than the cache the first blocks stay."""
    cache = PrefixCache(2 * BLOCK + 63)
    cache.insert(keys(1, 2, 3, 4))
    assert cache.cached_tokens(keys(1, 2, 3, 4)) == cache.tokens == 2 * BLOCK


def test_clear_forgets_and_leaves_the_cache_usable():
    """After clear nothing is found, and inserting works."""
    cache = PrefixCache(4 * BLOCK)
    cache.insert(keys(1, 2))
    cache.clear()
    assert cache.cached_tokens(keys(1, 2)) == cache.tokens == 0
    cache.insert(keys(1))
    assert cache.cached_tokens(keys(1, 2)) == BLOCK


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30), st.integers(0, 8))
def test_no_block_outlives_the_blocks_before_it(sequences, capacity):
    """Whatever is inserted, the cache never exceeds its capacity, and a held block's prefix is held."""
    cache = PrefixCache(capacity * BLOCK)
    for blocks in sequences:
        cache.insert(keys(*blocks))
        assert cache.tokens <= capacity * BLOCK
        for seen in sequences:
            held = [key in cache._blocks for key in keys(*seen)]
            assert held == sorted(held, reverse=True)
