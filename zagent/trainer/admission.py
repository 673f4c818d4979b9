"""How far generation may run ahead of training: which groups may start, and which ones the trainer is given. Pure.

The time between two weight updates is a *window*; in it the trainer takes ``trigger_parameter_sync_step`` batches of
``required_samples`` groups each. A group is one prompt with all its samples; its *staleness* is the number of updates
since the oldest token in it. Names and formulas are those of verl's fully asynchronous policy, which bounds only how
many groups are under way: a long one may run through any number of updates. Here each also has its *seat*: the trainer
is given a younger group first only if all older ones can still be given in time. Long answers are waited for, not
thrown away, which would leave the trainer with short ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from zagent.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Counts are groups. Raises `ConfigError` for limits that nothing could pass."""

    #: In a batch of the trainer's: verl's ppo_mini_batch_size × require_batches.
    required_samples: int
    #: Batches between two updates.
    trigger_parameter_sync_step: int = 1
    #: Share of a window that may be begun in the window before. 0: nothing, so that all is sampled by the weights that
    #: it is trained on.
    staleness_threshold: float = 0.0
    #: Groups begun beyond that, as far as `staleness_threshold`, rounded up, lets them wait: the trainer is given the
    #: first to finish, the others later. With 0, 1, 2, … there is no room for any.
    over_sample: int = 0
    #: That run at once: best so many as fill the engines, since more get in each other's way and finish together, and
    #: then nothing runs until the next update. None: as many as there may be.
    max_concurrent_samples: int | None = None
    #: That run or are finished and not taken. Never dropped: it is admission that waits. None: `max_required_samples`.
    max_queue_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("required_samples", 1), ("trigger_parameter_sync_step", 1), ("over_sample", 0)):
            check_count(name, getattr(self, name), least)
        threshold: Any = self.staleness_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, Real):
            raise ConfigError(f"staleness_threshold must be a number, got {threshold!r}")
        if not 0 <= float(threshold) < math.inf:
            raise ConfigError(f"staleness_threshold must be at least 0, got {threshold}")
        if self.max_concurrent_samples is not None:
            check_count("max_concurrent_samples", self.max_concurrent_samples, 1)
        if self.max_queue_size is not None:
            check_count("max_queue_size", self.max_queue_size, 1)
        if self.queue_size < self.required_samples:
            raise ConfigError(
                f"max_queue_size={self.max_queue_size}: a batch needs {self.required_samples} finished groups at once"
            )

    @property
    def window(self) -> int:
        """Groups that the trainer takes between two updates."""
        return self.required_samples * self.trigger_parameter_sync_step

    @property
    def max_required_samples(self) -> int:
        """That may be begun in a window, those counted that it begins with. The trainer takes `window` of them, which
        leaves at most ``staleness_threshold * window + over_sample`` for those to come; and no more than find a seat in
        as many of them as a group may wait."""
        begun = int(self.required_samples * (self.staleness_threshold + 1) * self.trigger_parameter_sync_step)
        return min(begun + self.over_sample, self.window * (math.ceil(self.staleness_threshold) + 1))

    @property
    def max_staleness(self) -> int:
        """Updates that any token of a group may be behind when the trainer is given it: at most
        ``staleness_threshold``, rounded up. The last group of `max_required_samples` has its seat so many windows
        later."""
        return (self.max_required_samples - 1) // self.window

    @property
    def queue_size(self) -> int:
        return self.max_required_samples if self.max_queue_size is None else self.max_queue_size


def check_count(name: str, value: Any, least: int) -> None:
    """Raise `ConfigError` unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if int(value) < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class _Given:
    """A group that the trainer has."""

    version: int  #: of its oldest token
    age: int  #: of that, when it was taken
    window: int  #: in which it was taken, counted from 1


class Admission:
    """Events in, decisions out. Groups are numbered from 0 in the order of their admission; each ends in exactly one
    `take` or one `drop`."""

    def __init__(self, limits: Limits, version: int = 0) -> None:
        self.limits = limits
        #: verl's staleness_samples: groups that count against `Limits.max_required_samples` in this window.
        self.opened = 0
        self.admitted = 0
        #: Groups by why the trainer never saw them.
        self.dropped: Counter[str] = Counter()
        #: Staleness -> groups that were taken with it.
        self.staleness: Counter[int] = Counter()
        self._versions = [version]  # at the beginning of each window
        self._running: dict[int, int] = {}  # group -> the version it was admitted at
        self._finished: dict[int, int] = {}  # group -> the version of its oldest token; in order of finishing
        self._taken = 0  # in this window
        self._given: dict[int, _Given] = {}  # some windows ago at most

    @property
    def version(self) -> int:
        return self._versions[-1]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> int:
        """Not taken yet."""
        return len(self._finished)

    @property
    def update_due(self) -> bool:
        """Whether the trainer has taken all that it should before its next update."""
        return self._taken >= self.limits.window

    @property
    def is_open(self) -> bool:
        """Whether a group may start now."""
        limits = self.limits
        return (
            self.opened < limits.max_required_samples
            and self.running + self.finished < limits.queue_size
            and (limits.max_concurrent_samples is None or self.running < limits.max_concurrent_samples)
        )

    @property
    def is_stuck(self) -> bool:
        """Whether nothing will finish before the next update, however long one waits."""
        return not self.running and not self.is_open

    def admit(self) -> int:
        """One more starts; its number. Raises `RuntimeError` unless `is_open`."""
        if not self.is_open:
            raise RuntimeError("no group may start now")
        group = self.admitted
        self._running[group] = self.version
        self.admitted += 1
        self.opened += 1
        return group

    def finish(self, group: int, oldest: int | None) -> bool:
        """It has all its samples; ``oldest`` is the version of their oldest token (None: none has any). False: it came
        too late, and was dropped."""
        admitted = self._running.pop(group)
        self._finished[group] = admitted if oldest is None else oldest
        return not self._drop_stale([group])

    def drop(self, group: int, reason: str) -> None:
        """The trainer will not see it. Another may start in its place, in the same window."""
        if self._running.pop(group, None) is None:
            del self._finished[group]
        self.dropped[reason] += 1
        self.opened -= 1

    def advance(self, version: int, updates: int = 1) -> list[int]:
        """New weights, or (the same version) another window for the same ones; of several ``updates`` the last, after
        those of the versions just below. The finished groups that are too stale now: they were dropped."""
        if version - updates + 1 < self.version:
            raise ValueError(f"version {version} comes after {self.version}")
        self._versions += range(version - updates + 1, version + 1)
        self._taken = 0
        late = self._drop_stale(list(self._finished))
        self.opened = self.running + self.finished
        self._given = {
            group: given
            for group, given in self._given.items()
            if len(self._versions) - given.window <= self.limits.max_staleness + 1
        }
        return late

    def batch(self) -> list[int] | None:
        """What to give the trainer now, the oldest first; None: wait."""
        batch = self._oldest_first()[: self.limits.required_samples]
        if len(batch) < self.limits.required_samples or self._leaves_too_many(batch):
            return None
        return batch

    def rest(self) -> list[int]:
        """The last batch, where nothing runs or will start any more: shorter, or empty."""
        return self._oldest_first()[: self.limits.required_samples]

    def take(self, batch: Sequence[int]) -> None:
        """The trainer has it."""
        for group in batch:
            version = self._finished.pop(group)
            given = self._given[group] = _Given(version, self.age(version), len(self._versions))
            self.staleness[given.age] += 1
        self._taken += len(batch)

    def put_back(self, batch: Sequence[int]) -> list[int]:
        """The trainer has not got it after all: it may be taken again, before others as old. The groups of it that are
        too stale now: they were dropped, or if that is long ago stay counted as taken."""
        back = {group: given for group in batch if (given := self._given.pop(group, None)) is not None}
        for given in back.values():
            self.staleness[given.age] -= 1
            if given.window == len(self._versions):
                self._taken -= 1
            else:
                self.opened += 1
        self.staleness = +self.staleness  # without those of which there are none
        self._finished = {group: given.version for group, given in back.items()} | self._finished
        self._drop_stale(list(back))
        return [group for group in batch if group not in self._finished]

    def age(self, version: int) -> int:
        """Updates since ``version`` was the newest: not a difference of numbers, which may leave some out."""
        return len(self._versions) - bisect_right(self._versions, version)

    def _oldest_first(self) -> list[int]:
        return sorted(self._finished, key=self._finished.__getitem__)  # stable: then in order of finishing

    def _leaves_too_many(self, batch: Sequence[int]) -> bool:
        """Whether an older group than the youngest of ``batch`` still runs, and of those left some would come too late.
        A window has `Limits.window` seats; a group of age a needs one in this or the next ``max_staleness - a``."""
        limits = self.limits
        running = [v for v in self._running.values() if self.age(v) <= limits.max_staleness]  # others are lost anyway
        youngest = self._finished[batch[-1]]
        if all(version >= youngest for version in running):
            return False  # waiting would change nothing
        chosen = set(batch)
        left = [*running, *(version for group, version in self._finished.items() if group not in chosen)]
        seats = max(0, limits.window - self._taken - len(batch))
        ages = sorted(map(self.age, left), reverse=True)
        return any(i >= seats + (limits.max_staleness - age) * limits.window for i, age in enumerate(ages))

    def _drop_stale(self, groups: Sequence[int]) -> list[int]:
        late = [group for group in groups if self.age(self._finished[group]) > self.limits.max_staleness]
        for group in late:
            self.drop(group, "stale")
        return late
