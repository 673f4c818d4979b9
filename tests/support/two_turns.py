"""An agent loop of two engine calls, with tokens inserted after each. Imported in workers by `rollout.imports`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import zagent
from zagent.loops.trajectory import Trajectory

#: Tokens that each call may sample, and those inserted after it.
TURNS = ((7, [10, 11, 12, 13, 14]), (9, [20, 21, 22]))


@zagent.register("two_turns")
class TwoTurns(zagent.AgentLoopBase):
    """Ends with inserted tokens, which no engine has seen."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> zagent.AgentLoopOutput:
        prompt = self.fit_prompt(await self.apply_chat_template(kwargs["raw_prompt"]))
        trajectory = Trajectory(prompt, self.rollout_config.response_length)
        session = uuid4().hex
        for budget, inserted in TURNS:
            params = {**sampling_params, "max_new_tokens": budget}
            trajectory.add_sampled(await self.server_manager.generate(session, trajectory.context(), params))
            trajectory.add_inserted(inserted)
        return trajectory.output(num_turns=5)
