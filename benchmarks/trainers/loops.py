"""Three trainers, which differ in when they ask for batches. Training is a pause of ``train_s`` seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zagent
from benchmarks.rollout.agent import Done


@dataclass(frozen=True)
class Work:
    """Groups of ``n`` samples; ``weights``: what the engines are given at each step."""

    prompts: Sequence[zagent.DataProto]
    n: int
    groups: int  #: of a batch
    train_s: float
    weights: Path
    staleness_threshold: float

    @property
    def steps(self) -> int:
        return len(self.prompts) // self.groups

    def batches(self) -> Iterator[zagent.DataProto]:
        """All prompts in batches, each prompt ``n`` times."""
        for step in range(self.steps):
            rows = zagent.DataProto.concat(list(self.prompts[step * self.groups :][: self.groups])).repeat(self.n)
            rows.non_tensor_batch["sample"] = zagent.DataProto(
                non_tensor_batch={"sample": list(range(self.n)) * self.groups}
            ).non_tensor_batch["sample"]
            rows.meta_info["global_steps"] = step + 1
            yield rows


@dataclass
class Trained:
    """What a trainer has seen. Times are of the monotonic clock."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    waited_s: float = 0.0  #: for batches
    staleness: int = 0  #: the largest, in updates
    bound: int = 0
    hidden_shares: list[float] = field(default_factory=list)
    rows: list[list[Done]] = field(default_factory=list)

    def train(self, batch: zagent.DataProto, work: Work) -> None:
        self.rows += [[Done(*call) for call in row] for row in batch.non_tensor_batch["calls"]]
        time.sleep(work.train_s)
        self.ended = time.monotonic()

    @property
    def hidden_share(self) -> float:
        return statistics.median(self.hidden_shares) if self.hidden_shares else 0.0


def synchronous(manager: zagent.AgentLoopManager, work: Work) -> Trained:
    """Generate, train, update."""
    seen = Trained()
    for rows in work.batches():
        asked = time.monotonic()
        if seen.ended:
            manager.update_weights(work.weights)
        batch = manager.generate_sequences(rows)
        seen.waited_s += time.monotonic() - asked
        seen.train(batch, work)
    return seen


def one_step_off(manager: zagent.AgentLoopManager, work: Work) -> Trained:
    """The next batch is generated while this one is trained on."""
    seen = Trained(bound=1)
    with zagent.OneStepOffAgentLoopManager(manager, work.batches(), weights=lambda: work.weights) as steps:
        for batch in steps:
            facts = batch.meta_info["one_step_off"]
            seen.waited_s += facts["wait_s"] + facts["sync_s"]
            seen.staleness = max(seen.staleness, facts["staleness"])
            if "hidden_share" in facts:
                seen.hidden_shares.append(facts["hidden_share"])
            seen.train(batch, work)
    return seen


def fully_async(manager: zagent.AgentLoopManager, work: Work) -> Trained:
    """Groups as they finish."""
    seen = Trained()
    with zagent.FullyAsyncAgentLoopManager(
        manager, work.prompts, ppo_mini_batch_size=work.groups, staleness_threshold=work.staleness_threshold, n=work.n
    ) as batches:
        seen.bound = batches.limits.max_staleness
        asked = time.monotonic()
        for batch in batches:
            seen.waited_s += time.monotonic() - asked
            facts = batch.meta_info["fully_async"]
            seen.staleness = max(seen.staleness, int(facts["fully_async/trajectory_staleness/max"]))
            seen.train(batch, work)
            asked = time.monotonic()
            batches.update_weights(work.weights)
    return seen


LOOPS: dict[str, Callable[[zagent.AgentLoopManager, Work], Trained]] = {
    "zagent": fully_async,
    "one-step-off": one_step_off,
    "synchronous": synchronous,
}
