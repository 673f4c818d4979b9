"""The tools of a worker, and the choice of a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zagent.config import MultiTurnConfig
from zagent.errors import ConfigError, InputError
from zagent.loops.tools.base import BaseTool


class Toolbox:
    """Tools by name, in their order. Raises `ConfigError` where two have one name."""

    def __init__(self, tools: Iterable[BaseTool] = ()) -> None:
        self._tools: dict[str, BaseTool] = {}
        for one in tools:
            if one.name in self._tools:
                raise ConfigError(f"two tools are called {one.name!r}")
            self._tools[one.name] = one
        self.schemas: list[dict[str, Any]] = [one.get_openai_tool_schema() for one in self]

    @classmethod
    def load(cls, multi_turn: MultiTurnConfig) -> Toolbox:
        """The tools of `multi_turn.tool_config_path` and those under `@zagent.tool`; `multi_turn.tools` chooses among
        them and adds dotted paths. To be called once per worker, after `rollout.imports`.

        Raises:
            ConfigError: a tool that cannot be found or built, or not in time; names the entry.
        """
        from zagent.loops.tools.load import load_tools

        return cls(load_tools(multi_turn))

    def select(self, names: Sequence[str] | None) -> Toolbox:
        """The tools of a row (its `tools`); None: all of them. Raises `InputError`, which lists the names."""
        if names is None:
            return self
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InputError(f"tools must be a list of names, got {names!r:.200}")
        for name in names:
            if name not in self._tools:
                raise InputError(f"tools: no tool {name!r}; known: {', '.join(self.names) or 'none'}")
        return Toolbox(self._tools[name] for name in dict.fromkeys(names))

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def get(self, name: str) -> BaseTool | None:
        return self._tools.get(name)

    def __iter__(self) -> Iterator[BaseTool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)
