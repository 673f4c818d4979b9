"""What loops of several turns share: ask the model, tell it something, stop at the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np

from zagent.errors import LoopError
from zagent.loops.base import AgentLoopBase, with_budget
from zagent.loops.trajectory import Trajectory
from zagent.loops.vision import expand_images, trained_fields
from zagent.loops.vision_tokens import VisionTokens
from zagent.types import AgentLoopMetrics, AgentLoopOutput, TokenOutput

Message = dict[str, Any]


@dataclass(slots=True)
class Dialogue:
    """A row under way: its messages for people and parsers, its tokens for the engine and the trainer."""

    messages: list[Message]
    #: Schemas that the template shows to the model.
    schemas: list[dict[str, Any]] | None
    trajectory: Trajectory
    vision: VisionTokens
    #: The model's last answer.
    answer: TokenOutput = field(default_factory=lambda: TokenOutput(np.empty(0, np.int32)))
    assistant_turns: int = 0
    #: Rounds of tools, and replies of a user or an environment.
    user_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)


class MultiTurnLoop(AgentLoopBase):
    """Base of loops in which model and world speak in turn.

    The prompt of each call is all that was sent and sampled before, token by token, and what `tell` inserted; the whole
    trajectory is one session, so its engine finds it in the prefix cache.
    """

    async def open(self, messages: Sequence[Message], schemas: list[dict[str, Any]] | None = None) -> Dialogue:
        """Render the prompt. Raises `PromptTooLong`, `TemplateError`, and `InputError` for an image."""
        self.session = self.session or uuid4().hex
        vision = VisionTokens(self.processor)
        prompt = await expand_images(vision, await self.apply_chat_template(list(messages), tools=schemas), messages)
        ids = self.fit_prompt(prompt.ids, has_images=bool(prompt.images))
        vision.add(prompt, at=0)
        return Dialogue(list(messages), schemas, Trajectory(ids, self.rollout_config.response_length), vision)

    async def ask(self, dialogue: Dialogue, sampling_params: dict[str, Any]) -> bool:
        """Let the model speak; its answer joins tokens and messages. False where no token may be sampled any more: the
        engine is not called."""
        trajectory = dialogue.trajectory
        context = trajectory.context()
        budget = self.token_budget(len(context), trajectory.response_tokens, sampling_params)
        if budget <= 0:
            return False
        ids, images = dialogue.vision.sendable(context)
        params = with_budget(sampling_params, budget)
        dialogue.answer = await self.server_manager.generate(self.session, ids, params, images)
        dialogue.vision.check(context, dialogue.answer)
        trajectory.add_sampled(dialogue.answer)
        dialogue.assistant_turns += 1
        dialogue.messages.append({"role": "assistant", "content": await self._answer_text(dialogue.answer)})
        return True

    async def tell(self, dialogue: Dialogue, messages: Sequence[Message]) -> bool:
        """Append ``messages`` (tool results, a user's reply) and ask for the next answer; False where their tokens do
        not fit the response, and nothing has been appended. Raises `LoopError` before the first answer."""
        if not dialogue.assistant_turns:
            raise LoopError("tell() before the first ask(): there is no answer to go on from")
        ids = await self.continue_chat(dialogue.answer.token_ids, list(messages), dialogue.schemas)
        piece = await expand_images(dialogue.vision, ids, messages)
        at = len(dialogue.trajectory.prompt_ids) + dialogue.trajectory.response_tokens
        if not dialogue.trajectory.add_inserted(piece.ids):
            return False
        dialogue.vision.add(piece, at)  # images join only together with their tokens
        dialogue.messages.extend(messages)
        dialogue.user_turns += 1
        return True

    def at_limit(self, dialogue: Dialogue) -> bool:
        """The answer just given must be the last: the response is full, or a limit of turns is reached."""
        limits = self.rollout_config.multi_turn
        return (
            dialogue.trajectory.full
            or _reached(dialogue.assistant_turns, limits.max_assistant_turns)
            or _reached(dialogue.user_turns, limits.max_user_turns)
        )

    async def finish(
        self, dialogue: Dialogue, reward_score: float | None = None, **extra_fields: Any
    ) -> AgentLoopOutput:
        """The finished row."""
        fields = {
            "turn_scores": dialogue.turn_scores,
            "tool_rewards": dialogue.tool_rewards,
            "messages": dialogue.messages,
            **await trained_fields(dialogue.vision),
        }
        return dialogue.trajectory.output(
            num_turns=dialogue.user_turns + dialogue.assistant_turns + 1,
            multi_modal_data=dialogue.vision.multi_modal_data(),
            reward_score=reward_score,
            metrics=dialogue.metrics,
            extra_fields={**fields, **extra_fields},
        )

    async def _answer_text(self, answer: TokenOutput) -> str:
        """``answer`` with its special tokens (some formats of tool calls are made of them), without the stop
        token."""
        ids = [int(token) for token in answer.token_ids]

        def decode() -> str:
            ended = bool(ids) and ids[-1] in self._template({}).stop_ids
            return str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))

        return await self.in_tokenizer_thread(decode)


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit
