"""A loop of two turns in which an image joins the conversation between them."""

from __future__ import annotations

from typing import Any

import zagent
from zagent.loops.base import with_budget
from zagent.loops.trajectory import Trajectory
from zagent.loops.vision import expand_images, trained_fields
from zagent.loops.vision_tokens import VisionTokens


@zagent.register("second_picture")
class SecondPicture(zagent.AgentLoopBase):
    """Answers `raw_prompt`, is then shown the message `reply`, and answers again; `turn_tokens` each time."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> zagent.AgentLoopOutput:
        messages, reply = kwargs["raw_prompt"], [kwargs["reply"]]
        self.vision = VisionTokens(self.processor)
        prompt = await expand_images(self.vision, await self.apply_chat_template(messages), messages)
        self.vision.add(prompt, at=0)
        trajectory = Trajectory(prompt.ids, self.rollout_config.response_length)
        answer = await self.ask(trajectory, with_budget(sampling_params, kwargs["turn_tokens"]))
        shown = await expand_images(self.vision, await self.continue_chat(answer.token_ids, reply), reply)
        at = len(trajectory.context())
        if trajectory.add_inserted(shown.ids):
            self.vision.add(shown, at)
            await self.ask(trajectory, with_budget(sampling_params, kwargs["turn_tokens"]))
        return trajectory.output(
            num_turns=4,
            extra_fields=await trained_fields(self.vision),
            multi_modal_data=self.vision.multi_modal_data(),
        )

    async def ask(self, trajectory: Trajectory, params: dict[str, Any]) -> zagent.TokenOutput:
        context = trajectory.context()
        ids, images = self.vision.sendable(context)
        answer = await self.server_manager.generate(self.session, ids, params, images)
        self.vision.check(context, answer)
        trajectory.add_sampled(answer)
        return answer
