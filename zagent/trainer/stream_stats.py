"""What a stream of groups tells about itself, under verl's names where there is one. Pure.

Since the beginning (`totals`; all keys have the prefix ``fully_async/``):

* ``count/current_param_version``; in groups ``count/total_generated_samples``, ``count/staleness_samples`` (of
  ``static/max_required_samples`` in this window), ``count/stale_samples_processed`` (taken with staleness above 0),
  ``monitor/active_tasks_size`` (run), ``monitor/queue/mq_queue_size`` (wait for the trainer)
* ``staleness/N``: groups taken whose oldest token was N updates old; ``dropped/REASON``: `failed`, `filtered`,
  `aborted` (partial rollout is off), `stale`, `cancelled`
* ``rollouter/idle_ratio`` (share of the time in which nothing ran), ``rollouter/active_tasks_mean``,
  ``rollouter/blocked_s`` (a prompt was there and had to wait), ``trainer/idle_ratio``, ``trainer/wait_s``

Of a batch (`of_batch`, `lengths`): ``trajectory_staleness/{mean,max}``, ``partial/…``,
``response_length/{kept,carried,dropped}/{rows,mean,median,max}``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zagent.trainer.admission import Admission
from zagent.trainer.collate import VERSIONS
from zagent.trainer.groups import Group
from zagent.types import AgentLoopOutput, Outcome

#: Prefix of all keys, and the key of a batch's `meta_info`.
STATISTICS = "fully_async"


class Meter:
    """A count over time, in seconds of whatever clock ``now`` is: its mean, and how long it was zero."""

    def __init__(self, now: float) -> None:
        self._began = self._since = now
        self._value = 0
        self._area = self._at_zero = 0.0

    def set(self, value: int, now: float) -> None:
        """It is ``value`` from ``now`` on."""
        elapsed, self._since = now - self._since, now
        self._area += self._value * elapsed
        self._at_zero += 0.0 if self._value else elapsed
        self._value = value

    def mean(self) -> float:
        """From the beginning to the last `set`; 0 before any time has passed."""
        return self._area / self.elapsed_s if self.elapsed_s else 0.0

    def idle_share(self) -> float:
        """Share of that time at zero."""
        return self._at_zero / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def elapsed_s(self) -> float:
        return self._since - self._began


def totals(admission: Admission) -> dict[str, float]:
    """Counts of groups since the beginning, and the limits."""
    limits = admission.limits
    found: dict[str, float] = {
        "count/current_param_version": admission.version,
        "count/total_generated_samples": admission.admitted - admission.running,
        "count/staleness_samples": admission.opened,
        "count/stale_samples_processed": sum(count for age, count in admission.staleness.items() if age),
        "monitor/active_tasks_size": admission.running,
        "monitor/queue/mq_queue_size": admission.finished,
        "static/required_samples": limits.required_samples,
        "static/max_required_samples": limits.max_required_samples,
        "static/max_queue_size": limits.queue_size,
        "static/max_staleness": limits.max_staleness,
    }
    found |= {f"staleness/{age}": count for age, count in sorted(admission.staleness.items())}
    return found | {f"dropped/{reason}": count for reason, count in sorted(admission.dropped.items())}


def of_batch(groups: Sequence[Group], age: Callable[[int], int]) -> dict[str, float]:
    """How old a batch is, in updates (``age`` of a version): of each row's oldest token at most, of its sampled tokens
    on average; and the rows that lived through updates."""
    outputs = [o for group in groups for outcome in group.outcomes if (o := outcome.output) is not None]
    oldest, means, spans = [], [], []
    for output in outputs:
        ages = _token_ages(output, age)
        if len(ages):
            oldest.append(int(ages.max()))
            means.append(float(ages.mean()))
            spans.append(int(ages.max() - ages.min()))
    partial = sum(span > 0 for span in spans)
    return {
        "trajectory_staleness/mean": statistics.fmean(means) if means else 0.0,
        "trajectory_staleness/max": max(oldest, default=0),
        "partial/total_partial_num": partial,
        "partial/partial_ratio": partial / len(spans) if spans else 0.0,
        "partial/max_partial_span": max(spans, default=0),
    }


def _token_ages(output: AgentLoopOutput, age: Callable[[int], int]) -> np.ndarray:
    """Int64 [sampled tokens]."""
    versions = output.extra_fields.get(VERSIONS)
    versions = np.empty(0, np.int64) if versions is None else np.asarray(versions, np.int64)
    numbers, places = np.unique(versions[versions >= 0], return_inverse=True)
    return np.array([age(int(number)) for number in numbers], np.int64)[places]


def lengths(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """How long the responses are, in tokens: `rows`, and where there are some `mean`, `median`, `max`."""
    found = [len(outcome.output.response_ids) for outcome in outcomes if outcome.output is not None]
    if not found:
        return {"rows": 0}  # NaN is no JSON, and 0 no length
    return {
        "rows": len(found),
        "mean": statistics.fmean(found),
        "median": statistics.median(found),
        "max": max(found),
    }


def lengths_line(statistics: dict[str, float]) -> str:
    """Response lengths of a batch's rows beside those of rows that were finished but not taken, or dropped: where the
    first are shorter, it is short answers that the trainer sees."""
    parts = []
    for name in ("kept", "carried", "dropped"):
        rows, mean, median, most = (
            statistics.get(f"{STATISTICS}/response_length/{name}/{key}", 0) for key in ("rows", "mean", "median", "max")
        )
        parts.append(f"{name} {rows:.0f} rows" + (f" of {mean:.0f} tokens ({median:.0f}, {most:.0f})" if rows else ""))
    running = statistics[f"{STATISTICS}/monitor/active_tasks_size"]
    return "response lengths, mean (median, longest): " + ", ".join(parts) + f"; {running:.0f} groups run on"
