"""Any interleaving of starts, ends, drops, batches and updates keeps the bounds, and loses or doubles no group."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zagent.trainer.admission import Admission, Limits

index = st.integers(0, 50)


class Punctual(RuleBasedStateMachine):
    """The core beside a model that only knows what it was told; the trainer updates when it has taken its batches."""

    @initialize(
        limits=st.builds(
            Limits,
            st.integers(1, 3),
            trigger_parameter_sync_step=st.integers(1, 3),
            staleness_threshold=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.7]),
            over_sample=st.integers(0, 3) | st.just(50),
            max_concurrent_samples=st.none() | st.integers(1, 5),
            max_queue_size=st.none() | st.integers(3, 9),
        )
    )
    def begin(self, limits: Limits) -> None:
        self.limits = limits
        assert limits.max_staleness <= math.ceil(limits.staleness_threshold)
        self.core = Admission(self.limits, version=5)
        self.updates = [5]
        self.running: dict[int, int] = {}  # group -> number of updates when its oldest token can have been sampled
        self.finished: dict[int, int] = {}
        self.taken: list[int] = []
        self.last: dict[int, int] = {}  # the last batch, if it was taken in this window
        self.dropped: Counter[str] = Counter()
        self.begun = 0  # that count in this window
        self.taken_now = 0

    # ---- events -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.is_open)
    @rule()
    def admit(self) -> None:
        group = self.core.admit()
        assert group not in {*self.running, *self.finished, *self.taken}
        self.running[group] = len(self.updates)
        self.begun += 1

    @precondition(lambda self: self.running)
    @rule(which=index, later=st.integers(0, 3), empty=st.booleans())
    def finish(self, which: int, later: int, empty: bool) -> None:
        group = sorted(self.running)[which % len(self.running)]
        began = self.running.pop(group)
        if not empty:
            began = min(began + later, len(self.updates))
        if self.core.finish(group, None if empty else self.updates[began - 1]):
            self.finished[group] = began
        else:
            assert self.staleness(began) > self.limits.max_staleness
            self.lost("stale")

    @precondition(lambda self: self.running or self.finished)
    @rule(which=index, reason=st.sampled_from(["failed", "filtered"]))
    def drop(self, which: int, reason: str) -> None:
        groups = sorted([*self.running, *self.finished])
        group = groups[which % len(groups)]
        self.core.drop(group, reason)
        self.running.pop(group, None)
        self.finished.pop(group, None)
        self.lost(reason)

    @precondition(lambda self: self.taken_now < self.limits.window)
    @rule()
    def take(self) -> None:
        batch = self.core.batch()
        if batch is None:
            return
        assert len(batch) == self.limits.required_samples
        self.core.take(batch)
        for group in batch:
            assert self.staleness(self.finished[group]) <= self.limits.max_staleness
        self.taken += batch
        self.taken_now += len(batch)
        self.last = {group: self.finished.pop(group) for group in batch}

    @precondition(lambda self: self.last)
    @rule()
    def put_back(self) -> None:
        """Before the next update, as a trainer does that is interrupted."""
        assert self.core.put_back(list(self.last)) == []
        self.taken = self.taken[: -len(self.last)]
        self.taken_now -= len(self.last)
        self.finished |= self.last
        self.last = {}

    @precondition(lambda self: self.taken_now >= self.limits.window)
    @rule(step=st.integers(1, 10))
    def update(self, step: int) -> None:
        assert self.core.update_due
        self.updates.append(self.updates[-1] + step)
        for group in self.core.advance(self.updates[-1]):
            assert self.staleness(self.finished.pop(group)) > self.limits.max_staleness
            self.dropped["stale"] += 1
        self.begun = len(self.running) + len(self.finished)
        self.taken_now, self.last = 0, {}

    def lost(self, reason: str) -> None:
        self.dropped[reason] += 1
        self.begun -= 1

    def staleness(self, began: int) -> int:
        return len(self.updates) - began

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        core = self.core
        assert (core.running, core.finished) == (len(self.running), len(self.finished))
        assert len(set(self.taken)) == len(self.taken)
        assert core.dropped == self.dropped
        ended = len(self.taken) + self.dropped.total()
        assert core.admitted == ended + len(self.running) + len(self.finished)

    @invariant()
    def the_bounds_hold(self) -> None:
        core, limits = self.core, self.limits
        assert core.opened == self.begun <= limits.max_required_samples
        assert core.running + core.finished <= limits.queue_size + limits.required_samples  # what was put back
        assert limits.max_concurrent_samples is None or core.running <= limits.max_concurrent_samples
        assert max(core.staleness, default=0) <= limits.max_staleness
        assert core.staleness.total() == len(self.taken)

    @invariant()
    def nothing_comes_too_late_for_a_punctual_trainer(self) -> None:
        assert self.dropped["stale"] == 0

    def teardown(self) -> None:
        """Where all that runs finishes, the trainer gets its next batches, however it stands."""
        if not hasattr(self, "core"):
            return
        for _ in range(3):
            while self.core.batch() is None and self.taken_now < self.limits.window:
                while self.core.is_open:
                    self.admit()
                assert self.running
                self.finish(0, 0, empty=True)
            if self.taken_now < self.limits.window:
                self.take()
            else:
                self.update(1)


class Hasty(Punctual):
    """A trainer that updates whenever it likes: the staleness bound holds all the same, at the price of drops."""

    @rule(updates=st.integers(1, 3), late=st.booleans())
    def update_early(self, updates: int, late: bool) -> None:
        """Perhaps several times; perhaps the last batch is put back then."""
        self.updates += range(self.updates[-1] + 1, self.updates[-1] + 1 + updates)
        for group in self.core.advance(self.updates[-1], updates):
            assert self.staleness(self.finished.pop(group)) > self.limits.max_staleness
            self.dropped["stale"] += 1
        last, self.last = self.last, {}
        if late and updates <= self.limits.max_staleness + 1:
            lost = self.core.put_back(list(last))
            assert lost == [group for group in last if self.staleness(last[group]) > self.limits.max_staleness]
            self.taken = self.taken[: len(self.taken) - len(last)]
            self.dropped["stale"] += len(lost)
            self.finished |= {group: began for group, began in last.items() if group not in lost}
        self.begun = len(self.running) + len(self.finished)
        self.taken_now = 0

    def nothing_comes_too_late_for_a_punctual_trainer(self) -> None:
        """It is not."""


for machine, promise in (
    (
        Punctual,
        "Nothing is ever too stale for a trainer that takes its batches, and it never waits for what cannot come.",
    ),
    (Hasty, "What is too stale never reaches the trainer, whenever it updates."),
):
    machine.TestCase.settings = settings(
        max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine.TestCase.__doc__ = machine.TestCase.runTest.__doc__ = promise
TestPunctual = Punctual.TestCase
TestHasty = Hasty.TestCase
pytestmark = pytest.mark.timeout(300)
