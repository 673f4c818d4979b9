"""Which groups may start, and which ones the trainer is given: verl's formulas, and one example each."""

from __future__ import annotations

from typing import Any

import pytest

from zagent.errors import ConfigError
from zagent.trainer.admission import Admission, Limits


def admitted(core: Admission) -> list[int]:
    """As many as may start now."""
    groups = []
    while core.is_open:
        groups.append(core.admit())
    return groups


def finished(core: Admission, *groups: int) -> None:
    for group in groups:
        assert core.finish(group, None)


def taken(core: Admission) -> list[int]:
    batch = core.batch()
    assert batch is not None
    core.take(batch)
    return batch


@pytest.mark.parametrize(
    ("limits", "most", "staleness"),
    [
        (Limits(16), 16, 0),
        (Limits(16, trigger_parameter_sync_step=4), 64, 0),
        (Limits(16, trigger_parameter_sync_step=4, staleness_threshold=0.1), 70, 1),
        (Limits(32, trigger_parameter_sync_step=4, staleness_threshold=0.5), 192, 1),
        (Limits(16, staleness_threshold=1.0), 32, 1),
        (Limits(16, staleness_threshold=1.5), 40, 2),
        (Limits(16, staleness_threshold=3.0), 64, 3),
        (Limits(16, staleness_threshold=0.01), 16, 0),
        (Limits(16, staleness_threshold=0.01, over_sample=4), 20, 1),
        (Limits(16, staleness_threshold=0.5, over_sample=4), 28, 1),
        (Limits(16, staleness_threshold=0.5, over_sample=9), 32, 1),
        (Limits(16, over_sample=4), 16, 0),
        (Limits(2, trigger_parameter_sync_step=2, over_sample=2), 4, 0),
        (Limits(1, staleness_threshold=3.0, over_sample=50), 4, 3),
    ],
)
def test_the_formulas(limits: Limits, most: int, staleness: int) -> None:
    """required × (1 + staleness_threshold) × trigger_parameter_sync_step, cut to an integer; `over_sample` more where
    they have seats; and the updates that the last of so many groups may wait: the threshold, rounded up, at most."""
    assert limits.max_required_samples == limits.queue_size == most
    assert limits.max_staleness == staleness


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"required_samples": 0}, "required_samples must be at least 1, got 0"),
        ({"trigger_parameter_sync_step": 0}, "trigger_parameter_sync_step must be at least 1"),
        ({"over_sample": -1}, "over_sample must be at least 0"),
        ({"staleness_threshold": -0.1}, "staleness_threshold must be at least 0"),
        ({"staleness_threshold": float("nan")}, "staleness_threshold must be at least 0"),
        ({"staleness_threshold": float("inf")}, "staleness_threshold must be at least 0"),
        ({"max_concurrent_samples": 0}, "max_concurrent_samples must be at least 1"),
        ({"max_queue_size": 7}, "max_queue_size=7: a batch needs 8"),
        ({"max_queue_size": -1}, "max_queue_size must be at least 1, got -1"),
        ({"required_samples": 2.5}, "required_samples must be a whole number, got 2.5"),
        ({"required_samples": True}, "required_samples must be a whole number, got True"),
        ({"trigger_parameter_sync_step": "4"}, "trigger_parameter_sync_step must be a whole number, got '4'"),
        ({"staleness_threshold": "0.5"}, "staleness_threshold must be a number, got '0.5'"),
        ({"staleness_threshold": None}, "staleness_threshold must be a number, got None"),
    ],
)
def test_limits_that_nothing_could_pass_are_refused(wrong: dict[str, Any], match: str) -> None:
    """By name and value."""
    with pytest.raises(ConfigError, match=match):
        Limits(**{"required_samples": 8, **wrong})


def test_threshold_0_is_on_policy() -> None:
    """Two batches of one version, then nothing until the update; all are of staleness 0."""
    core = Admission(Limits(2, trigger_parameter_sync_step=2))
    assert admitted(core) == [0, 1, 2, 3]
    finished(core, 3, 1)
    assert taken(core) == [3, 1]
    assert not core.is_open
    finished(core, 0, 2)
    assert taken(core) == [0, 2]
    assert core.is_stuck
    core.advance(1)
    assert admitted(core) == [4, 5, 6, 7]
    assert core.staleness == {0: 4}


def test_what_is_carried_over_counts_in_the_next_window() -> None:
    """Half a window may be begun ahead; what runs or waits at the update takes seats of the next one."""
    core = Admission(Limits(4, staleness_threshold=0.5))
    assert admitted(core) == [0, 1, 2, 3, 4, 5]
    finished(core, 0, 1, 2, 3, 4)
    assert taken(core) == [0, 1, 2, 3]
    assert not core.is_open
    core.advance(1)
    assert (core.opened, core.running, core.finished) == (2, 1, 1)
    assert admitted(core) == [6, 7, 8, 9]


def test_surplus_groups_come_first_in_the_next_batch() -> None:
    """The oldest first; of the same version in order of finishing."""
    core = Admission(Limits(2, staleness_threshold=1.0))
    finished(core, *reversed(admitted(core)))
    assert taken(core) == [3, 2]
    core.advance(1)
    finished(core, *admitted(core))
    assert taken(core) == [1, 0]
    assert core.staleness == {0: 2, 1: 2}


def test_a_young_group_is_not_given_the_seat_of_an_older_one() -> None:
    """Group 1 runs on over an update. While there is a seat for it later in the window, others go first; the last
    batch waits for it."""
    core = Admission(Limits(1, trigger_parameter_sync_step=2, staleness_threshold=0.5))
    assert admitted(core) == [0, 1, 2]
    finished(core, 0, 2)
    assert (taken(core), taken(core)) == ([0], [2])
    core.advance(1)
    assert admitted(core) == [3, 4]
    finished(core, 3, 4)
    assert taken(core) == [3]
    assert core.batch() is None
    finished(core, 1)
    assert taken(core) == [1]
    assert core.update_due
    core.advance(2)
    assert taken(core) == [4]
    assert core.staleness == {0: 3, 1: 2}


def test_with_seats_in_several_windows_the_oldest_still_have_theirs() -> None:
    """Two groups that run through the first window both need the second one: none of the next two may go before."""
    core = Admission(Limits(2, staleness_threshold=1.0))
    assert admitted(core) == [0, 1, 2, 3]
    finished(core, 0, 1)
    assert taken(core) == [0, 1]
    core.advance(1)
    assert admitted(core) == [4, 5]
    finished(core, 4, 5)
    assert core.batch() is None
    finished(core, 3)
    assert core.batch() is None
    finished(core, 2)
    assert taken(core) == [3, 2]


def test_a_dropped_group_opens_its_place_in_the_same_window() -> None:
    """Whether it runs or has finished; the reason is counted."""
    core = Admission(Limits(2))
    assert admitted(core) == [0, 1]
    core.drop(0, "failed")
    assert admitted(core) == [2]
    finished(core, 1)
    core.drop(1, "filtered")
    assert admitted(core) == [3]
    finished(core, 2, 3)
    assert taken(core) == [2, 3]
    assert core.dropped == {"failed": 1, "filtered": 1}


def test_the_oldest_token_decides() -> None:
    """A group that was admitted early and began late is as young as its tokens."""
    core = Admission(Limits(1, staleness_threshold=1.0))
    assert admitted(core) == [0, 1]
    finished(core, 0)
    taken(core)
    core.advance(1)
    assert core.finish(1, oldest=1)
    taken(core)
    assert core.staleness == {0: 2}


def test_updates_are_counted_not_version_numbers() -> None:
    """A trainer may call its versions 10, 20, 30."""
    core = Admission(Limits(1, staleness_threshold=1.0), version=10)
    assert admitted(core) == [0, 1]
    finished(core, 0, 1)
    assert taken(core) == [0]
    core.advance(20)
    assert (core.age(10), core.age(20), core.age(21)) == (1, 0, 0)
    assert taken(core) == [1]
    assert core.staleness == {0: 1, 1: 1}


def test_several_updates_at_once_are_as_many_windows() -> None:
    """Each version between may have been one: what was sampled by it is as old as that makes it."""
    core = Admission(Limits(1, staleness_threshold=3.0))
    core.advance(5, updates=3)
    assert [core.age(version) for version in (0, 2, 3, 4, 5)] == [3, 3, 2, 1, 0]
    with pytest.raises(ValueError, match="version 6 comes after 5"):
        core.advance(6, updates=3)


def test_what_is_put_back_was_not_taken() -> None:
    """It comes before others as old, and the window has its seats again."""
    core = Admission(Limits(2, staleness_threshold=1.0))
    finished(core, *admitted(core))
    assert taken(core) == [0, 1]
    assert core.update_due
    assert core.put_back([0, 1]) == []
    assert (core.update_due, core.finished, core.opened, core.staleness) == (False, 4, 4, {})
    assert taken(core) == [0, 1]


def test_what_is_put_back_after_an_update_counts_in_that_window_or_is_too_stale() -> None:
    """Of the former it takes a seat; of the latter it is told. Long ago, nothing changes any more."""
    core = Admission(Limits(1, staleness_threshold=1.0))
    finished(core, *admitted(core))
    assert taken(core) == [0]
    core.advance(1)
    assert core.opened == 1
    assert core.put_back([0]) == []
    assert (core.opened, core.finished, core.staleness) == (2, 2, {})
    assert taken(core) == [0]
    core.advance(2)
    assert core.put_back([0]) == [0]
    assert core.dropped == {"stale": 2}
    finished(core, *admitted(core))
    batch = taken(core)
    for version in (3, 4, 5):
        core.advance(version)
    counted = core.staleness.copy()
    assert core.put_back(batch) == batch
    assert core.staleness == counted


def test_what_is_too_stale_is_dropped_and_counted() -> None:
    """After updates that came before their time: at the update what has finished, at its end what runs."""
    core = Admission(Limits(1, trigger_parameter_sync_step=2))
    assert admitted(core) == [0, 1]
    finished(core, 0)
    assert core.advance(1) == [0]
    assert core.opened == 1
    assert not core.finish(1, oldest=0)
    assert core.dropped == {"stale": 2}
    assert admitted(core) == [2, 3]


def test_nobody_waits_for_a_group_that_is_lost_anyway() -> None:
    """It is too stale already, and will be dropped."""
    core = Admission(Limits(1))
    admitted(core)
    core.advance(1)
    core.drop(0, "failed")
    admitted(core)
    core.advance(2)
    assert core.running == 1
    assert not core.is_open  # the lost one has the only place
    assert not core.finish(1, oldest=1)
    finished(core, *admitted(core))
    assert core.batch() == [2]


def test_a_full_queue_closes_admission() -> None:
    """What runs has its place in it already, so nothing that finishes is ever thrown away."""
    core = Admission(Limits(2, staleness_threshold=2.0, max_queue_size=3))
    assert admitted(core) == [0, 1, 2]
    finished(core, 0, 1, 2)
    assert not core.is_open
    taken(core)
    assert admitted(core) == [3, 4]


def test_only_so_many_run_at_once() -> None:
    """The next starts when one has finished."""
    core = Admission(Limits(4, max_concurrent_samples=2))
    assert admitted(core) == [0, 1]
    finished(core, 1)
    assert admitted(core) == [2]


def test_a_group_that_may_not_start_does_not() -> None:
    """`admit` checks it itself."""
    core = Admission(Limits(1))
    admitted(core)
    with pytest.raises(RuntimeError, match="no group may start now"):
        core.admit()


def test_versions_do_not_go_back() -> None:
    """The same one again opens a window in which nothing has aged."""
    core = Admission(Limits(1), version=3)
    finished(core, *admitted(core))
    assert core.advance(3) == []
    assert taken(core) == [0]
    assert core.staleness == {0: 1}
    with pytest.raises(ValueError, match="version 2 comes after 3"):
        core.advance(2)


def test_the_last_batch_is_shorter() -> None:
    """Where the prompts have ended."""
    core = Admission(Limits(2, staleness_threshold=0.5))
    finished(core, *admitted(core))
    assert taken(core) == [0, 1]
    assert core.batch() is None
    core.take(core.rest())
    assert core.rest() == []
    assert core.staleness == {0: 3}
