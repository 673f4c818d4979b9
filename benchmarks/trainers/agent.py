"""The agent loop that replays one row of a trace for each sample of a prompt. Imported in workers."""

from __future__ import annotations

from typing import Any

import zagent
from benchmarks.rollout.agent import Replay

NAME = "replay_samples"


@zagent.register(NAME)
class ReplaySamples(Replay):
    """`Replay` of the sample's own row, so that lengths differ within a group as well."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        return await super().run(sampling_params, **{**row, "trace": row["traces"][row["sample"]]})
