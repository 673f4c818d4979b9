"""What a trajectory's engine calls sampled, and which weights sampled each token of the response. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from zagent.types import AgentLoopOutput, StopReason, TokenOutput


@dataclass(slots=True)
class Sampled:
    """Sums over the engine calls of one trajectory."""

    prompt_tokens: int = 0  #: sent
    cached_tokens: int = 0  #: of those, found in the prefix cache
    seconds: float = 0.0  #: waited for, calls that ran side by side counted each
    num_preempted: int | None = None
    last_stop_reason: StopReason | None = None
    #: Per call, in order: int32 ids, and the weight version of each (int64).
    segments: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, prompt_tokens: int, output: TokenOutput, seconds: float) -> None:
        """One more call has been answered."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += output.cached_tokens
        self.seconds += seconds
        self.last_stop_reason = output.stop_reason
        if output.num_preempted is not None:
            self.num_preempted = (self.num_preempted or 0) + output.num_preempted
        self.segments.append((np.asarray(output.token_ids, np.int32), versions_of(output)))

    @property
    def versions(self) -> set[int]:
        """All weight versions that sampled."""
        return {int(version) for _, versions in self.segments for version in np.unique(versions)}


def versions_of(output: TokenOutput) -> np.ndarray:
    """Weight version of each token of ``output``, int64 [tokens]."""
    versions = np.full(len(output.token_ids), -1, np.int64)
    for version, start, end in output.versions:
        versions[start:end] = version
    return versions


def response_versions(output: AgentLoopOutput, sampled: Sampled) -> np.ndarray:
    """Weight version of each response token, int64 [tokens], −1 on tokens that were not sampled.

    The masked tokens are followed through the calls in order; a call that does not continue them (a branch the loop
    dropped) is skipped. Where they cannot be followed to the end, the one version there was is taken; were there
    several, the rest stays −1.
    """
    mask = np.asarray(output.response_mask) == 1
    ids = np.asarray(output.response_ids, np.int32)[mask]
    found = np.full(len(ids), -1, np.int64)
    at = 0
    for tokens, versions in sampled.segments:
        count = min(len(tokens), len(ids) - at)
        if np.array_equal(tokens[:count], ids[at : at + count]):
            found[at : at + count] = versions[:count]
            at += count
    if at < len(ids) and len(sampled.versions) == 1:
        found[at:] = next(iter(sampled.versions))
    result = np.full(len(mask), -1, np.int64)
    result[mask] = found
    return result
