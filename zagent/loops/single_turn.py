"""`single_turn_agent`: one prompt, one answer."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import numpy as np

from zagent.loops.base import AgentLoopBase, versions_array, with_budget
from zagent.loops.registry import register
from zagent.types import AgentLoopMetrics, AgentLoopOutput, TokenOutput


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One engine call; `num_turns` is 2 (the user's and the assistant's)."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        rendered = await self.apply_chat_template(kwargs["raw_prompt"], tools=kwargs.get("tools"))
        prompt_ids = self.fit_prompt(rendered)
        budget = self.token_budget(len(prompt_ids), 0, sampling_params)
        started = time.monotonic()
        if budget > 0:
            params = with_budget(sampling_params, budget)
            output = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt_ids, sampling_params=params
            )  # fmt: skip
        else:
            output = TokenOutput(np.empty(0, np.int32), stop_reason="length")
        return self._output(prompt_ids, output, await self.decode(output.token_ids), time.monotonic() - started)

    def _output(self, prompt_ids: np.ndarray, output: TokenOutput, text: str, seconds: float) -> AgentLoopOutput:
        limit = self.rollout_config.response_length
        experts = output.routed_experts
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[:limit],
            response_mask=np.ones(len(output.token_ids[:limit]), np.int32),
            response_logprobs=None if output.log_probs is None else output.log_probs[:limit],
            routed_experts=None if experts is None else experts[: len(prompt_ids) + limit],
            num_turns=2,
            metrics=AgentLoopMetrics(
                generate_sequences=seconds,
                num_preempted=-1 if output.num_preempted is None else output.num_preempted,
            ),
            extra_fields={"response_text": text, "rollout_versions": versions_array(output)[:limit]},
        )
