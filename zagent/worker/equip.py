"""What a worker gives each agent loop beside its constructor's arguments."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zagent.loops.base import AgentLoopBase
from zagent.loops.tools import Toolbox


def equip(loop: Any, **attributes: Any) -> None:
    """Set ``attributes`` on ``loop``, which may be of any class; what it has made itself under one of those names
    stays."""
    for name, value in attributes.items():
        if not _has_its_own(loop, name):
            with suppress(AttributeError):  # __slots__, or a property: nothing of ours is wanted there
                setattr(loop, name, value)


def _has_its_own(loop: Any, name: str) -> bool:
    method = getattr(type(loop), name, None)
    return name in getattr(loop, "__dict__", ()) or (
        callable(method) and method is not getattr(AgentLoopBase, name, None)
    )


def select(toolbox: Toolbox | None, column: Any) -> Toolbox | None:
    """The tools of a row whose column `tools` is ``column``: those it names; all where it is None or holds schemas
    (which `single_turn_agent` shows as they are). None = no tools."""
    if toolbox is None or not toolbox.names:
        return None
    by_name = isinstance(column, (list, tuple)) and all(isinstance(entry, str) for entry in column)
    chosen = toolbox.select(column) if by_name else toolbox
    return chosen if chosen.names else None
