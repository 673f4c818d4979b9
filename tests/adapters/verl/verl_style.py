"""Agent loops as they are written for verl 0.9: nothing here knows of zagent."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput


@register("two_turns")
class TwoTurns(AgentLoopBase):
    """Asks, replies with the row's `reply`, asks again: tokens, mask and log-probabilities as verl's own loops keep
    them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages, metrics = list(kwargs["raw_prompt"]), {}
        multi_modal_data = await self.process_multi_modal_info(messages)
        self._assert_mm_supported(bool(multi_modal_data))
        ids = await self.ct_build_initial_tokens(messages, images=multi_modal_data.get("images"))
        prompt_length, request_id = len(ids), uuid4().hex
        mask: list[int] = []
        log_probs: list[float] | None = []
        for turn in range(2):
            with simple_timer("generate_sequences", metrics):
                output: TokenOutput = await self.server_manager.generate(
                    request_id=request_id,
                    prompt_ids=ids,
                    sampling_params=sampling_params,
                    image_data=None,
                    audio_data=None,
                    mm_processor_kwargs=self._get_mm_processor_kwargs(None),
                    priority=3,
                )
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, log_probs, assistant_logprobs=output.log_probs
            )
            ids = merged.token_ids
            if turn == 0:
                answered = [*messages, {"role": "assistant", "content": "…"}]
                replied = [*answered, {"role": "user", "content": kwargs["reply"]}]
                merged, mask, log_probs = await self.ct_merge_context_msg(answered, replied, ids, mask, log_probs)
                ids = merged.token_ids
        metrics["num_preempted"] = -1
        return AgentLoopOutput(
            prompt_ids=ids[:prompt_length],
            response_ids=ids[prompt_length:][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=log_probs[: self.response_length],
            multi_modal_data=multi_modal_data,
            num_turns=4,
            metrics=metrics,
            extra_fields={**output.extra_fields, "model": self.config.actor_rollout_ref.model.path},
        )


class Early(AgentLoopBase):
    """In the manner of verl 0.7: helpers of the base class, its configuration as attributes and by `get`. Named by its
    dotted path, with an argument of its own."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        self.suffix = kwargs.pop("suffix", "")
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            metrics={},
            extra_fields={
                "said": self.tokenizer.decode(output.token_ids) + self.suffix,
                "format": turns.format,
                "longest": self.data_config.get("max_response_length"),
                "stop": output.stop_reason,
            },
        )
