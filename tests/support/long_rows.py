"""An agent loop whose rows are as long as they may be. Imported in workers by `rollout.imports`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import zagent


@zagent.register("long_rows")
class LongRows(zagent.AgentLoopBase):
    """One engine call that goes on beyond the end of the answer."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> zagent.AgentLoopOutput:
        prompt = self.fit_prompt(await self.apply_chat_template(kwargs["raw_prompt"]))
        params = {**sampling_params, "ignore_eos": True, "max_new_tokens": self.rollout_config.response_length}
        made = await self.server_manager.generate(uuid4().hex, prompt, params)
        return zagent.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=made.token_ids,
            response_mask=[1] * len(made.token_ids),
            response_logprobs=made.log_probs,
            num_turns=2,
        )
