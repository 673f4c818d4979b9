"""What a modelled engine's memory holds, keeps and throws out."""

from __future__ import annotations

from benchmarks.modelled.kv import KvMemory


def test_a_shared_block_counts_once_until_its_last_holder_is_gone() -> None:
    """Samples of one prompt hold one copy of it."""
    memory = KvMemory(3)
    memory.hold([1, 2])
    memory.hold([1, 2])
    assert memory.held == 2
    memory.release([1, 2])
    assert memory.held == 2
    memory.release([1, 2])
    assert (memory.held, memory.known([1, 2, 3])) == (0, 2)


def test_only_a_whole_beginning_is_known() -> None:
    """A later block without the ones before it is of no use."""
    memory = KvMemory(9)
    memory.hold([1, 3])
    assert memory.known([1, 2, 3]) == 1
    assert memory.known([2, 3]) == 0


def test_the_least_recently_used_goes_first_and_a_prefix_end_before_its_beginning() -> None:
    """Never what a running call holds."""
    memory = KvMemory(4)
    for keys in ([1, 2], [3, 4]):
        memory.hold(keys)
        memory.release(keys)
    memory.hold([5])
    assert (memory.known([1, 2]), memory.known([3, 4])) == (1, 2)
    assert memory.fits([6, 7, 8])
    assert not memory.fits([6, 7, 8], reserve=1)
    memory.hold([6, 7, 8])
    assert (memory.held, memory.known([5]), memory.known([3])) == (4, 1, 0)
