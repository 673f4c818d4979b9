"""The trajectory of the benchmark: one answer that takes as long as its row says."""

from __future__ import annotations

from typing import Any

import numpy as np

import zagent

NAME = "scale"
#: Speed of the simulated engines: a second a token.
TOKENS_PER_S = 1.0


@zagent.register(NAME)
class Waits(zagent.AgentLoopBase):
    """Asks for ``seconds`` tokens."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        prompt = np.asarray(await self.apply_chat_template(row["raw_prompt"]), np.int32)
        params = {**sampling_params, "max_new_tokens": int(row["seconds"] * TOKENS_PER_S)}
        answer = await self.server_manager.generate(self.session, prompt, params)
        return zagent.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=answer.token_ids,
            response_mask=np.ones(len(answer.token_ids), np.int32),
            response_logprobs=answer.log_probs,
            num_turns=2,
        )
