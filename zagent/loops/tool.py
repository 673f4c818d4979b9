"""`tool_agent`: the model calls tools until it answers, or until a limit ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

from zagent.errors import InputError
from zagent.loops.interactions import BaseInteraction, InteractionRun, choose
from zagent.loops.multi_turn import Dialogue, MultiTurnLoop
from zagent.loops.parsers import FunctionCall, find_parser
from zagent.loops.registry import register
from zagent.loops.tools import Toolbox, ToolContext, ToolResult, run_calls
from zagent.types import AgentLoopOutput


class State(StrEnum):
    """Where a trajectory is (verl's names)."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@register("tool_agent")
class ToolAgentLoop(MultiTurnLoop):
    """PENDING → GENERATING → PROCESSING_TOOLS or INTERACTING → GENERATING → … → TERMINATED.

    After an answer, in this order: the response is full, `max_assistant_turns`, `max_user_turns`: stop. Else its calls
    are run, together, and their results appended; without calls the interaction replies, if the row has one; without
    either the trajectory ends. Calls in an answer cut off by its length are not run.
    """

    #: By name; built once per worker.
    interactions: Mapping[str, BaseInteraction] = {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        check_choice(kwargs.get("tools"), self.tools)
        self._params, self._row = sampling_params, kwargs
        self._parser = find_parser(self.rollout_config.multi_turn.format, self.server_manager)
        self._calls: list[FunctionCall] = []
        self._interaction = InteractionRun(
            *choose(self.interactions, kwargs), self.rollout_config.multi_turn.tool_timeout
        )
        self._shared: dict[str, Any] = {}
        dialogue = await self.open(kwargs["raw_prompt"], self._schemas())
        steps: dict[State, Callable[[Dialogue], Awaitable[State]]] = {
            State.PENDING: self._begin,
            State.GENERATING: self._generate,
            State.PROCESSING_TOOLS: self._use_tools,
            State.INTERACTING: self._interact,
        }
        state = State.PENDING
        try:
            while state is not State.TERMINATED:
                state = await steps[state](dialogue)
            score = await self._interaction.score()
        finally:
            await self._interaction.finalize()
        return await self.finish(dialogue, score)

    def _schemas(self) -> list[dict[str, Any]] | None:
        shown = self.tools is not None and self.rollout_config.multi_turn.tools_in_template
        return self.tools.schemas or None if shown and self.tools is not None else None

    async def _begin(self, dialogue: Dialogue) -> State:
        await self._interaction.start()
        return State.GENERATING

    async def _generate(self, dialogue: Dialogue) -> State:
        if not await self.ask(dialogue, self._params):
            return State.TERMINATED
        message = dialogue.messages[-1]
        text = message["content"]
        if self.at_limit(dialogue) or dialogue.answer.stop_reason == "abort":
            return State.TERMINATED
        if self.tools is not None and dialogue.answer.stop_reason == "stop":
            turn = await self._parser.parse(text, self.tools.schemas)
            if turn.calls:
                message |= {"content": turn.content, "tool_calls": [_as_message(call) for call in turn.calls]}
                self._calls = turn.calls
                return State.PROCESSING_TOOLS
        return State.INTERACTING if self._interaction else State.TERMINATED

    async def _use_tools(self, dialogue: Dialogue) -> State:
        assert self.tools is not None
        context = ToolContext(
            services=self.services,
            session=self.session,
            attempt=self.attempt,
            row=self._row,
            kwargs={},
            trajectory_data=self._shared,
            row_key=self.row_key,
        )
        limits = self.rollout_config.multi_turn
        results = await run_calls(self.tools, self._calls, context, limits, dialogue.metrics)
        dialogue.tool_rewards.extend(result.reward for result in results)
        for result in results:
            self.trace("tool", **_event(result))
        if not await self.tell(dialogue, [result.message() for result in results]):
            return State.TERMINATED
        return State.TERMINATED if dialogue.trajectory.full else State.GENERATING

    async def _interact(self, dialogue: Dialogue) -> State:
        reply = await self._interaction.reply(dialogue.messages)
        dialogue.turn_scores.append(reply.score)
        if reply.done:
            dialogue.messages.append(reply.message())
            return State.TERMINATED
        if not await self.tell(dialogue, [reply.message()]):
            return State.TERMINATED
        return State.TERMINATED if dialogue.trajectory.full else State.GENERATING


def check_choice(column: Any, chosen: Toolbox | None) -> None:
    """Raise `InputError` where a row's column `tools` is no list of names (or of schemas, which are not looked at), or
    names tools though there are none: it would silently run with others, or without."""
    entries = list(column) if isinstance(column, (list, tuple)) else None
    names = entries is not None and all(isinstance(entry, str) for entry in entries)
    schemas = entries is not None and all(isinstance(entry, Mapping) for entry in entries)
    if column is not None and not names and not schemas:
        raise InputError(f"column tools must be a list of names, got {column!r:.200}")
    if entries and names and chosen is None:
        raise InputError(f"column tools names {entries!r:.200}, and no tool is configured")


def _event(result: ToolResult) -> dict[str, Any]:
    """What a tracer is told of a call."""
    call = result.call
    return {
        "name": call.name,
        "arguments": call.arguments,
        "text": result.text,
        "ok": result.ok,
        "reward": result.reward,
        "seconds": result.seconds,
    }


def _as_message(call: FunctionCall) -> dict[str, Any]:
    """OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
