"""What a model may call: functions under `@zagent.tool`, `BaseTool` classes, and the one way they are run."""

from zagent.loops.tools.base import BadArguments as BadArguments
from zagent.loops.tools.base import BaseTool as BaseTool
from zagent.loops.tools.base import ToolContext as ToolContext
from zagent.loops.tools.base import ToolResponse as ToolResponse
from zagent.loops.tools.function import FunctionTool as FunctionTool
from zagent.loops.tools.function import tool as tool
from zagent.loops.tools.run import ToolResult as ToolResult
from zagent.loops.tools.run import run_calls as run_calls
from zagent.loops.tools.toolbox import Toolbox as Toolbox
