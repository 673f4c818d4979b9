"""One policy on real processes: launcher, broker, workers and simulated engines, with prompts that take time.

It shows that the samples of a prompt meet where the model says so. The simulated engine computes each prompt by itself,
so of samples that run beside each other on one engine, the first ones all compute it: what is saved is less than in the
model, and than in SGLang.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import numpy as np

import zagent

SAMPLES, ENGINES = 4, 4
#: Each prompt takes 0.25 s, each answer 0.16 s; two calls run at once on an engine.
OVERRIDES = (
    *("model.path=tiny", "engine.kind=sim", f"engine.count={ENGINES}", f"engine.sim.per_process={ENGINES}"),
    *("engine.sim.prefill_tokens_per_s=4000", "engine.sim.decode_tokens_per_s=400", "engine.sim.max_batch=2"),
    *("worker.count=1", "rollout.prompt_length=2048", "rollout.response_length=64"),
)
#: About 1 000 tokens of the tiny model's.
FILLING = "12 + 34 = 46. " * 80


def measured(group: bool, prompts: int, repeats: int) -> Iterator[tuple[float, float]]:
    """(makespan in s, share of the prompt tokens that were cached) of each of ``repeats`` batches. Raises whatever
    zagent raises."""
    with tempfile.TemporaryDirectory() as logs:
        settings = [*OVERRIDES, f"routing.group={str(group).lower()}", f"logs.dir={logs}"]
        with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=settings)) as manager:
            manager.generate_sequences(_batch(1, repeats))  # the first rows pay for the workers' lazy imports
            for repeat in range(repeats):
                batch = _batch(prompts, repeat)
                began = time.monotonic()
                made = manager.generate_sequences(batch)
                seconds = time.monotonic() - began
                columns = made.non_tensor_batch
                yield seconds, float(sum(columns["cached_tokens"]) / sum(columns["prompt_tokens"]))


def _batch(prompts: int, repeat: int) -> zagent.DataProto:
    """No two repeats have a prompt in common: what one has left in the caches is of no use to another."""
    uids = [f"{repeat}/{prompt}" for prompt in range(prompts) for _ in range(SAMPLES)]
    texts = [[{"role": "user", "content": f"{uid}: {FILLING}"}] for uid in uids]
    column = np.empty(len(texts), object)
    column[:] = texts
    return zagent.DataProto(non_tensor_batch={"raw_prompt": column, "uid": np.array(uids, object)})
