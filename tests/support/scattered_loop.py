"""A tool agent whose turns do not know of each other: a session per call."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import zagent
from zagent.loops.multi_turn import Dialogue
from zagent.loops.tool import ToolAgentLoop


@zagent.register("scattered_agent")
class ScatteredToolAgent(ToolAgentLoop):
    """What routing without sticky sessions does to the prefix cache."""

    async def ask(self, dialogue: Dialogue, sampling_params: dict[str, Any]) -> bool:
        self.session = uuid4().hex
        return await super().ask(dialogue, sampling_params)
