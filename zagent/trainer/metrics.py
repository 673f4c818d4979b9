"""Where the time of a batch went: `meta_info["timing"]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zagent.types import AgentLoopMetrics

#: Seconds per activity; the slowest row is the one with the largest sum.
TIMES = ("generate_sequences", "tool_calls", "compute_score")


def timing(
    metrics: Sequence[AgentLoopMetrics], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
) -> dict[str, float]:
    """verl's `agent_loop/…` keys over all rows, in seconds, preemptions and tokens.

    ``metrics`` has one entry per row, a failed row's being `AgentLoopMetrics()`. With no rows every key is still
    there: times and lengths 0, preemptions −1 (unknown).
    """
    rows = metrics or [AgentLoopMetrics()]
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in (*TIMES, "num_preempted")}
    found: dict[str, float] = {}
    for name, values in columns.items():
        found[f"agent_loop/{name}/min"] = values.min().item()
        found[f"agent_loop/{name}/max"] = values.max().item()
        found[f"agent_loop/{name}/mean"] = values.mean().item()
    slowest = int(np.sum([columns[name] for name in TIMES], axis=0).argmax())
    for name, values in columns.items():
        found[f"agent_loop/slowest/{name}"] = values[slowest].item()
    found["agent_loop/slowest/prompt_length"] = prompt_lengths[slowest] if prompt_lengths else 0
    found["agent_loop/slowest/response_length"] = response_lengths[slowest] if response_lengths else 0
    return found
