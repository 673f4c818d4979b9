"""The demonstration's tool, imported in every worker."""

from __future__ import annotations

from zagent.loops.tools import ToolContext, tool
from zagent.tiny.arithmetic import evaluate


@tool
def calculator(expression: str, context: ToolContext) -> int | str:
    """Integer arithmetic."""
    result = evaluate(expression)
    # A row may ask for a wrong result: who then answers with it has it from the tool.
    return result + int(context.kwargs.get("off_by", 0)) if isinstance(result, int) else result
