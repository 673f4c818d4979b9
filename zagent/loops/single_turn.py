"""`single_turn_agent`: one prompt, one answer."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np

from zagent.loops.base import AgentLoopBase, with_budget
from zagent.loops.registry import register
from zagent.loops.vision import expand_images, trained_fields
from zagent.loops.vision_tokens import VisionTokens
from zagent.types import AgentLoopOutput, TokenOutput


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One engine call; `num_turns` is 2 (the user's and the assistant's)."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages, vision = kwargs["raw_prompt"], VisionTokens(self.processor)
        prompt = await expand_images(vision, await self.apply_chat_template(messages, kwargs.get("tools")), messages)
        prompt_ids = self.fit_prompt(prompt.ids, has_images=bool(prompt.images))
        vision.add(prompt, at=0)
        budget = self.token_budget(len(prompt_ids), 0, sampling_params)
        output = TokenOutput(np.empty(0, np.int32), stop_reason="length")
        if budget > 0:
            ids, images = vision.sendable(prompt_ids)
            params = with_budget(sampling_params, budget)
            output = await self.server_manager.generate(uuid4().hex, ids, params, images)
            vision.check(prompt_ids, output)
        text = await self.decode(output.token_ids)
        return self._output(prompt_ids, output, vision, {"response_text": text, **await trained_fields(vision)})

    def _output(
        self, prompt_ids: np.ndarray, output: TokenOutput, vision: VisionTokens, extra_fields: dict[str, Any]
    ) -> AgentLoopOutput:
        limit = self.rollout_config.response_length
        response_ids = output.token_ids[:limit]
        experts = output.routed_experts
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=np.ones(len(response_ids), np.int32),
            response_logprobs=None if output.log_probs is None else output.log_probs[:limit],
            routed_experts=None if experts is None else experts[: len(prompt_ids) + limit],
            multi_modal_data=vision.multi_modal_data(),
            num_turns=2,
            extra_fields=extra_fields,
        )
