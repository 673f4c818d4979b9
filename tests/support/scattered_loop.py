"""A tool agent whose turns do not stay on one engine."""

from __future__ import annotations

from itertools import count
from typing import Any

import zagent
from zagent.loops.multi_turn import Dialogue
from zagent.loops.tool import ToolAgentLoop

#: Two sessions for everybody: the broker binds them to the two engines (ties go to the least recently chosen).
SESSIONS = ("left", "right")
_rows = count()


@zagent.register("scattered_agent")
class ScatteredToolAgent(ToolAgentLoop):
    """What routing without sticky sessions can do to the prefix cache: each turn goes to the other engine. A session
    per call would not show it: a call that follows another's end finds that one's engine the least busy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = next(_rows)

    async def ask(self, dialogue: Dialogue, sampling_params: dict[str, Any]) -> bool:
        self._turn += 1
        self.session = SESSIONS[self._turn % 2]
        return await super().ask(dialogue, sampling_params)
