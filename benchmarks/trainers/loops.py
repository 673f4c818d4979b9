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
    """Groups of ``n`` samples, so many a step; the fully asynchronous trainer takes them in ``parts``. ``weights`` is
    what the engines are given at each step."""

    prompts: Sequence[zagent.DataProto]
    n: int
    groups: int
    parts: int
    train_s: float
    weights: Path
    staleness_threshold: float = 1.0
    concurrent: int = 10  #: groups that run at once: rows for all slots, tools and tails; not more

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

    def train(self, batch: zagent.DataProto, seconds: float) -> None:
        self.rows += [[Done(*call) for call in row] for row in batch.non_tensor_batch["calls"]]
        time.sleep(seconds)
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
        seen.train(batch, work.train_s)
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
            seen.train(batch, work.train_s)
    return seen


def fully_async(manager: zagent.AgentLoopManager, work: Work) -> Trained:
    """Groups as they finish."""
    seen = Trained()
    with zagent.FullyAsyncAgentLoopManager(
        manager,
        work.prompts,
        n=work.n,
        ppo_mini_batch_size=work.groups // work.parts,
        trigger_parameter_sync_step=work.parts,
        staleness_threshold=work.staleness_threshold,
        max_concurrent_samples=work.concurrent,
    ) as batches:
        seen.bound = batches.limits.max_staleness
        asked = time.monotonic()
        for batch in batches:
            seen.waited_s += time.monotonic() - asked
            facts = batch.meta_info["fully_async"]
            seen.staleness = max(seen.staleness, int(facts["fully_async/trajectory_staleness/max"]))
            seen.train(batch, work.train_s / work.parts)
            asked = time.monotonic()
            if batches.update_due:
                batches.update_weights(work.weights)
    return seen


LOOPS: dict[str, Callable[[zagent.AgentLoopManager, Work], Trained]] = {
    "zagent": fully_async,
    "one-step-off": one_step_off,
    "synchronous": synchronous,
}
