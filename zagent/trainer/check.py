"""`check_logprobs`: do the engines sample from the model that is trained? Token by token, on a generated batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from zagent.data_proto import DataProto
from zagent.errors import InputError, LogprobMismatch
from zagent.trainer.logprobs import response_logprobs

#: Nats, mean of a row. Two float32 implementations of one model differ by 1e-6 or so; one optimizer step, by 1e-2.
TOLERANCE = 1e-4
#: Where the other rows agree to this share of the tolerance, those that are off are another engine's.
SPLIT = 0.1
#: Rows that are computed again, chosen at random: enough to meet every engine.
MAX_ROWS = 64
#: Version of tokens of which it is not known (`rollout_versions`).
UNKNOWN = -1
#: Tensors of a generated batch that are looked at.
NEEDED = ("response_mask", "rollout_versions")


@dataclass(frozen=True, slots=True)
class LogprobStatistics:
    """Over some tokens, with d = trainer's − engine's log-probability in nats and the importance ratio exp(d): |d| and
    the ratio; ``outside`` is the share of tokens whose |d| exceeds the tolerance."""

    tokens: int
    mean_difference: float
    max_difference: float
    ratio_mean: float
    ratio_std: float
    ratio_min: float
    ratio_max: float
    outside: float

    @classmethod
    def of(cls, differences: torch.Tensor, tolerance: float) -> LogprobStatistics:
        """Of ``differences`` d, float [tokens]; of no tokens, those of perfect agreement."""
        d = differences.double() if len(differences) else torch.zeros(1, dtype=torch.float64)
        ratio, distance = d.exp(), d.abs()
        return cls(
            tokens=len(differences),
            mean_difference=float(distance.mean()),
            max_difference=float(distance.max()),
            ratio_mean=float(ratio.mean()),
            ratio_std=float(ratio.std(correction=0)),
            ratio_min=float(ratio.min()),
            ratio_max=float(ratio.max()),
            outside=float((~(distance <= tolerance)).double().mean()),  # NaN is outside, too
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: |Δ| mean {self.mean_difference:.1e}, max {self.max_difference:.1e}; ratio "
            f"{self.ratio_mean:.4f} ± {self.ratio_std:.4f} ({self.ratio_min:.3f} to {self.ratio_max:.3f}); "
            f"{self.outside:.1%} outside"
        )


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """What `check_logprobs` found; ``ok`` unless there are ``problems``, each a sentence or two."""

    #: All sampled tokens of the rows looked at, and those of each weight version (−1: not known).
    total: LogprobStatistics
    by_version: dict[int, LogprobStatistics]
    #: Rows with tokens that were judged, and those of them that are off.
    rows: int
    rows_off: int
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        versions = [
            f"  version {version}: {one}" for version, one in self.by_version.items() if len(self.by_version) > 1
        ]
        return "\n".join([f"log-probabilities: {self.total}", *versions, *(f"  OFF: {one}" for one in self.problems)])

    def raise_for_problems(self) -> None:
        """Raise `LogprobMismatch`, with all that was found, unless ``ok``."""
        if self.problems:
            raise LogprobMismatch(str(self))


def check_logprobs(
    batch: DataProto,
    model: Any,
    *,
    temperature: float = 1.0,
    version: int | None = None,
    tolerance: float = TOLERANCE,
    max_rows: int | None = MAX_ROWS,
) -> LogprobCheck:
    """Compare `rollout_log_probs` of a generated ``batch`` with what ``model`` says about the same tokens.

    Finds what silently spoils training: a mask or log-probabilities that are shifted, an engine (or all of them) that
    samples from other weights than the trainer has, another temperature. Call it before ``model`` is trained on
    ``batch``. Nothing is changed.

    Args:
        model: a causal model of transformers (run in evaluation mode, without gradients), or the trainer's own
            log-probabilities of the responses, float [B, R] at ``temperature``, which may hold an error of their own.
        temperature: that the batch was sampled with (`rollout.temperature`). The engine's log-probabilities are of
            softmax(logits / temperature), before top-k and top-p, and of the plain softmax where it is 0.
        version: the weight version that should have sampled every token (`manager.version`). None: rows that are
            wholly of the newest one in the batch are judged, of the others there are only statistics.
        tolerance: a row is off if its mean |Δ| exceeds it. For engines that compute in bfloat16, about 0.1.
        max_rows: rows that ``model`` looks at, at random; None = all.

    Raises:
        InputError: the batch is none that was generated, or has no `rollout_log_probs`
            (`rollout.calculate_log_probs`); ``model`` is no model, one of another vocabulary or log-probabilities of
            another shape; a number that is out of range.
    """
    _check_numbers(temperature, version, tolerance, max_rows)
    _check_batch(batch)
    if isinstance(model, torch.Tensor):
        trainers = model.detach().float().cpu()
    else:
        batch = _some_rows(batch, max_rows)
        trainers = response_logprobs(model, batch, temperature or 1.0)
    engines, mask, versions = (
        batch.batch[key].detach().cpu() for key in ("rollout_log_probs", "response_mask", "rollout_versions")
    )
    if trainers.shape != engines.shape:
        raise InputError(f"log-probabilities of shape {tuple(trainers.shape)}, the batch's are {tuple(engines.shape)}")
    return _Compared(engines, trainers, mask == 1, versions, version, tolerance).report()


def _check_numbers(temperature: Any, version: Any, tolerance: Any, max_rows: Any) -> None:
    for name, value in (("temperature", temperature), ("tolerance", tolerance)):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name} is a number of at least 0, got {value!r}")
    for name, count, least in (("version", version, 0), ("max_rows", max_rows, 1)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < least:
            raise InputError(f"{name} is a whole number of at least {least}, or None, got {count!r}")


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, DataProto):
        raise InputError(f"a batch is a zagent.DataProto, got {type(batch).__name__}")
    if missing := [key for key in NEEDED if key not in batch.batch]:
        known = ", ".join(batch.batch) or "none"
        raise InputError(f"the batch has no {', '.join(missing)} (tensors: {known}): it is none that was generated")
    if "rollout_log_probs" not in batch.batch:
        raise InputError(
            "the batch has no rollout_log_probs: every row failed, or rollout.calculate_log_probs is false"
        )


def _some_rows(batch: DataProto, count: int | None) -> DataProto:
    """``count`` rows at random (every n-th row might always be the same engine's), the same for the same length."""
    if count is None or len(batch) <= count:
        return batch
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    some: DataProto = batch[order[:count].sort().values.numpy()]
    return some


@dataclass(frozen=True, slots=True)
class _Compared:
    """All tensors are [B, R]."""

    engines: torch.Tensor
    trainers: torch.Tensor
    sampled: torch.Tensor  #: bool
    versions: torch.Tensor
    version: int | None
    tolerance: float

    def report(self) -> LogprobCheck:
        found = sorted(set(self.versions[self.sampled].tolist()))
        judged = self._judged(found)
        differences = self.trainers - self.engines
        means = _row_means(differences.abs(), judged)
        seen = judged.any(dim=1)
        off = seen & ~(means <= self.tolerance)

        def statistics(tokens: torch.Tensor) -> LogprobStatistics:
            return LogprobStatistics.of(differences[tokens], self.tolerance)

        return LogprobCheck(
            total=statistics(self.sampled),
            by_version={one: statistics(self.sampled & (self.versions == one)) for one in found},
            rows=int(seen.sum()),
            rows_off=int(off.sum()),
            problems=(*self._misfits(), *self._wrong_versions(found), *self._disagreement(means, seen, off, judged)),
        )

    def _judged(self, found: list[int]) -> torch.Tensor:
        """Rows of one version only: what was sampled after an update in flight may rest on a cache of older weights."""
        newest = max(found, default=UNKNOWN) if self.version is None else self.version
        others = self.sampled & (self.versions != newest) & (self.versions != UNKNOWN)
        return self.sampled & ~others.any(dim=1, keepdim=True)

    def _misfits(self) -> Iterator[str]:
        if not self.sampled.any():
            yield "the batch has no sampled token"
        elsewhere = int((self.engines[~self.sampled] != 0).sum())
        if elsewhere:
            yield (
                f"{elsewhere} tokens have the engine's log-probability and response_mask 0: the mask does not fit the "
                "tokens (shifted by one?)"
            )

    def _wrong_versions(self, found: list[int]) -> Iterator[str]:
        others = [one for one in found if one not in (self.version, UNKNOWN)]
        if self.version is None or not others:
            return
        count, total = int(torch.isin(self.versions[self.sampled], torch.tensor(others)).sum()), int(self.sampled.sum())
        yield (
            f"{count} of {total} tokens were sampled by weight version {', '.join(map(str, others))}, not "
            f"{self.version}: weights that were not pushed, or not to every engine"
        )

    def _disagreement(
        self, means: torch.Tensor, seen: torch.Tensor, off: torch.Tensor, judged: torch.Tensor
    ) -> Iterator[str]:
        """``means``, ``seen``, ``off``: [B]."""
        if not off.any():
            return
        count, rows = int(off.sum()), int(seen.sum())
        said = f"{count} of {rows} rows are off by {float(means[off].nanmean()):.1e} on average"
        if (shift := self._shift(judged)) is not None:
            yield f"{said}: log-probabilities are shifted, the trainer's of a token belong to the one {shift} it"
        elif count < rows and (others := float(means[seen & ~off].mean())) < SPLIT * self.tolerance:
            yield (
                f"{said}, the others by {others:.1e}: an engine that samples from other weights than its peers, or "
                "tokens that were changed or masked wrongly after they were sampled"
            )
        else:
            yield (
                f"{said}: the engines sample from other weights than the trainer's, at another temperature than was "
                "said here, or in another precision (tolerance)"
            )

    def _shift(self, judged: torch.Tensor) -> str | None:
        """Where the trainer's log-probabilities fit the engine's if moved by one."""
        both = judged[:, 1:] & judged[:, :-1]
        for where, trainers, engines in (
            ("after", self.trainers[:, :-1], self.engines[:, 1:]),
            ("before", self.trainers[:, 1:], self.engines[:, :-1]),
        ):
            distance = (trainers - engines)[both].abs()
            if len(distance) and float(distance.mean()) <= self.tolerance:
                return where
        return None


def _row_means(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[B, R] -> [B]: the mean of the ``chosen`` values; NaN in a row without any."""
    return torch.where(chosen, values, torch.zeros(())).sum(dim=1) / torch.where(
        chosen.any(dim=1), chosen.sum(dim=1).double(), torch.tensor(math.nan)
    )
