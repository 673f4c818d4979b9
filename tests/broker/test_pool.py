"""Members and the choice among them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from zagent.broker.pool import TRANSITIONS, Caller, Lease, Member, Pool, State


def member(name: str, credits: int = 1000) -> Member:
    return Member("engine", name, 1, credits, b"d" + name.encode(), b"c" + name.encode())


def pool_of(count: int, credits: int = 1000) -> Pool:
    pool = Pool("engine")
    for i in range(count):
        pool.add(made := member(f"m{i}", credits))
        pool.ready(made)
    return pool


def acquire(pool: Pool, call: bytes = b"call") -> Lease:
    chosen = pool.least()
    assert chosen is not None
    lease = Lease((call, 1), Caller(b"", b"d", b"c"), b"d", chosen, None)
    pool.lease(lease)
    return lease


@pytest.mark.parametrize(("calls", "each"), [(200, 50), (1000, 250)])
def test_calls_one_after_another_are_spread_evenly(calls: int, each: int) -> None:
    """On four idle members, ties go to the least recently chosen (pitfalls A4, K14)."""
    pool = pool_of(4)
    for i in range(calls):
        pool.release(acquire(pool, b"%d" % i))
    assert all(abs(m.total - each) <= 1 for m in pool.members.values())


def test_the_next_calls_go_to_the_idle_member() -> None:
    """Counted is what is in flight, not what was ever assigned (pitfall A1)."""
    pool = pool_of(2)
    leases = [acquire(pool, b"%d" % i) for i in range(6)]
    for lease in leases:
        if lease.member.name == "m1":
            pool.release(lease)
    assert [acquire(pool, b"n%d" % i).member.name for i in range(3)] == ["m1"] * 3


def test_every_choice_is_a_member_with_the_fewest_in_flight() -> None:
    """Over random acquires and releases, also past several rebuilds of the heap."""
    rng, pool, held = random.Random(7), pool_of(9, credits=20), []
    for i in range(5000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        elif (chosen := pool.least()) is not None:
            assert chosen.in_flight == min(m.in_flight for m in pool.members.values())
            held.append(acquire(pool, b"%d" % i))
        else:
            assert all(m.in_flight == m.credits for m in pool.members.values())
    assert sum(m.in_flight for m in pool.members.values()) == len(held)


def test_credits_bound_what_a_member_gets() -> None:
    """A full pool has nobody to offer until one is released."""
    pool = pool_of(2, credits=2)
    leases = [acquire(pool, b"%d" % i) for i in range(4)]
    assert pool.least() is None
    pool.release(leases[0])
    assert pool.least() is leases[0].member


def test_release_is_idempotent() -> None:
    """The second release says False and changes nothing."""
    pool = pool_of(1)
    lease = acquire(pool)
    assert pool.release(lease)
    assert not pool.release(lease)
    assert lease.member.in_flight == 0


def test_the_heap_does_not_grow() -> None:
    """100 000 acquires and releases leave it at a few entries per member."""
    pool = pool_of(4)
    for i in range(100_000):
        pool.release(acquire(pool, b"%d" % i))
    assert len(pool._heap) <= 2 * len(pool.members) + 65


def test_a_newcomer_does_not_win_all_ties() -> None:
    """It counts as just chosen, and gets its even share from then on."""
    pool = pool_of(3)
    for i in range(30):
        pool.release(acquire(pool, b"%d" % i))
    pool.add(late := member("late"))
    pool.ready(late)
    chosen = [acquire(pool, b"n%d" % i) for i in range(4)]
    assert chosen[-1].member is late
    assert Counter(lease.member.name for lease in chosen) == Counter(["m0", "m1", "m2", "late"])


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("end", State)
def test_states_change_only_as_the_table_says(start: State, end: State) -> None:
    """An illegal step raises, names member and both states, and changes nothing."""
    made = member("m")
    made.state = start
    if end in TRANSITIONS[start]:
        made.become(end)
        assert made.state is end
    else:
        with pytest.raises(ValueError, match=f"m cannot go from {start} to {end}"):
            made.become(end)
        assert made.state is start


@pytest.mark.parametrize("state", sorted(set(State) - {State.READY}))
def test_only_ready_members_are_chosen(state: State) -> None:
    """Whoever is not ready (yet, for now or any more) is passed over, though its heap entries are still there."""
    pool = pool_of(2)
    pool.members["m0"].state = state
    assert [acquire(pool, b"%d" % i).member.name for i in range(3)] == ["m1"] * 3
