"""`BaseTool` and what it gets and gives."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict

from zagent.errors import ConfigError


def _encoded(value: Any) -> bytes:
    """An image or video as the bytes of its file; PIL images become PNG."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if type(value).__module__.partition(".")[0] != "PIL":
        raise ValueError(f"must be the bytes of a file or a PIL image, got {type(value).__name__}")
    file = io.BytesIO()
    value.save(file, format="PNG")
    return file.getvalue()


Media = Annotated[bytes, BeforeValidator(_encoded)]


class ToolResponse(BaseModel):
    """What a tool shows the model (verl's class): text, and encoded images and videos. PIL images become PNG bytes."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    image: list[Media] | None = None
    video: list[Media] | None = None


@dataclass(slots=True)
class ToolContext:
    """What a tool may know of the trajectory. A parameter annotated with this class is filled in, and the model does
    not see it.

    ``services`` are the cluster's, bound to this session; ``session`` is the same for all calls of one trajectory;
    ``attempt`` is above 1 where another worker was lost while it ran the row; ``row`` are the row's own values;
    ``kwargs`` is this tool's part of its `tools_kwargs`; ``trajectory_data`` is a dict shared by the tools of one
    trajectory; ``row_key`` is the same for all attempts at one row (`AgentLoopBase.row_key`).
    """

    services: Mapping[str, Any] = field(default_factory=dict)
    session: str = ""
    attempt: int = 1
    row: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    trajectory_data: dict[str, Any] = field(default_factory=dict)
    row_key: str = ""


class BadArguments(Exception):
    """The model's arguments do not fit the tool; the message says how, for the model."""


class BaseTool(ABC):
    """A tool with a life cycle: for each call `create`, `execute`, `calc_reward` where `execute` gives no reward, and
    always `release`.

    One object serves all trajectories of a worker; what belongs to one call is kept under its ``instance_id``. A
    method may be synchronous (it runs in a thread) and may have a parameter annotated `ToolContext`. Each takes the
    row's `tools_kwargs[name]["create_kwargs"]` (`execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`) as
    keywords.

    Args:
        config: `config` of its entry in `multi_turn.tool_config_path`.
        tool_schema: its OpenAI schema, ``{"type": "function", "function": {"name", "description", "parameters"}}``;
            None: `get_openai_tool_schema` is overridden.
    """

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        self.tool_schema = tool_schema
        self.tool_schema = self.get_openai_tool_schema()
        try:
            self.name: str = self.tool_schema["function"]["name"]
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{type(self).__name__} has no tool_schema with function.name") from error

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema that templates and parsers get."""
        return self.tool_schema  # type: ignore[return-value]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Prepare for one call. Returns the id that the other methods get, ``instance_id`` as a rule; the response is
        not shown."""
        return instance_id or uuid4().hex, ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, arguments: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run the call: (what the model is shown, the reward or None, metrics). Raise `BadArguments`, or anything, to
        tell the model what went wrong."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of a call whose `execute` gave None."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027 (most tools hold nothing)
        """Free what `create` took. Called once for each call that was begun, after errors, timeouts and cancellation
        too; what it raises is logged."""
