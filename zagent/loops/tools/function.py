"""Plain functions as tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from zagent.errors import ConfigError
from zagent.loops.tools.base import BaseTool, ToolContext, ToolResponse
from zagent.loops.tools.schema import Signature
from zagent.loops.tools.text import read_result
from zagent.loops.tools.threads import call

Function = TypeVar("Function", bound=Callable[..., Any])

_REGISTRY: dict[str, FunctionTool] = {}


class FunctionTool(BaseTool):
    """A function as tool: its schema comes from signature and docstring, and arguments are checked against it."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, description: str | None = None) -> None:
        if inspect.isclass(function) or not callable(function):
            raise ConfigError(f"@tool takes a function, got {function!r}")
        called = name or getattr(function, "__name__", "")
        if not called:
            raise ConfigError(f"@tool({function!r}) needs a name: @tool(name=…)")
        self.function = function
        self._signature = Signature(function, called)
        said = self._signature.description if description is None else description
        schema = {"name": called, "description": said, "parameters": self._signature.parameters}
        super().__init__(tool_schema={"type": "function", "function": schema})

    async def execute(
        self, instance_id: str, arguments: dict[str, Any], context: ToolContext | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """See `BaseTool`. Raises `BadArguments`."""
        values = self._signature.read(arguments)
        if self._signature.context is not None:
            values[self._signature.context] = context or ToolContext()
        return read_result(await call(self.function, **values))


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Function], Function]: ...


def tool(function: Any = None, /, *, name: str | None = None, description: str | None = None) -> Any:
    """Decorator: a function that models may call. The function itself stays as it is.

    Its schema comes from the annotations (pydantic's; `Annotated[…, Field(…)]` too) and the docstring. A synchronous
    function runs in a thread. It returns what the model sees (text, a number, a list or dict as JSON, or a
    `ToolResponse`), or ``(that, reward)``, or ``(that, reward, metrics)``; a tuple of two or three is always read so.
    What it raises is told to the model.

    Args:
        name: default: the function's.
        description: default: the docstring up to its sections.

    Raises:
        ConfigError: a signature without a schema, or a name that another function has.
    """
    if function is None:
        return lambda function: _register(function, name, description)
    return _register(function, name, description)


def _register(function: Function, name: str | None, description: str | None) -> Function:
    made = FunctionTool(function, name, description)
    before = _REGISTRY.get(made.name)
    if before is not None and _origin(before.function) != _origin(function):
        raise ConfigError(f"two tools are called {made.name!r}: {_origin(before.function)} and {_origin(function)}")
    _REGISTRY[made.name] = made
    return function


def _origin(function: Callable[..., Any]) -> str:
    """Where it was written: a module that is imported again registers its functions again."""
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def registered() -> dict[str, FunctionTool]:
    """Tools under `@tool` by name."""
    return dict(_REGISTRY)


def find_registered(function: Any) -> FunctionTool | None:
    """The tool that ``function`` was registered as."""
    return next((made for made in _REGISTRY.values() if made.function is function), None)
