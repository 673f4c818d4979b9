"""Agent loops that use services."""

from __future__ import annotations

from typing import Any

import zagent


class Calculates(zagent.AgentLoopBase):
    """Has the sandbox run the prompt's text; the row's reward is what that printed."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> zagent.AgentLoopOutput:
        code = kwargs["raw_prompt"][0]["content"]
        done = await self.services["sandbox"].run(code, limit=20)
        out = await self.server_manager.generate("r", [1, 2, 3], {"max_new_tokens": 2})
        return zagent.AgentLoopOutput(
            prompt_ids=[1, 2, 3],
            response_ids=out.token_ids,
            response_mask=[1, 1],
            reward_score=float(done["stdout"] or -1),
            num_turns=2,
            extra_fields={"exit_status": done["exit_status"]},
        )


class AsksTwice(zagent.AgentLoopBase):
    """Which process of the service answers, twice."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> zagent.AgentLoopOutput:
        pids = [await self.services["box"].pid() for _ in range(2)]
        return zagent.AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, extra_fields={"pids": pids}
        )
