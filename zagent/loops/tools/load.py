"""Tools by name, dotted path and YAML entry."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zagent.config import MultiTurnConfig
from zagent.errors import ConfigError
from zagent.loops.entries import load_entries
from zagent.loops.imports import why
from zagent.loops.tools.base import BaseTool
from zagent.loops.tools.check import checked_schema
from zagent.loops.tools.function import FunctionTool, find_registered, registered
from zagent.loops.tools.toolbox import Toolbox

#: Seconds that one tool may take to be imported and built (it may load an index, or wait for a service).
BUILD_DEADLINE_S = 120.0

_KEYS = {"class_name", "config", "tool_schema"}


def load_tools(multi_turn: MultiTurnConfig) -> list[BaseTool]:
    """See `Toolbox.load`."""
    path = multi_turn.tool_config_path
    known = Toolbox([*(_from_file(path) if path else ()), *registered().values()])
    if multi_turn.tools is None:
        return list(known)
    return [known.get(name) or _from_path(name, known.names) for name in multi_turn.tools]


def _from_file(path: str) -> list[BaseTool]:
    entries = load_entries(path, "tools", of="rollout.multi_turn.tool_config_path")
    return [_from_entry(f"{path}: entry {number}", entry) for number, entry in enumerate(entries)]


def _from_entry(where: str, entry: dict[str, Any]) -> BaseTool:
    unknown = [str(key) for key in entry if key not in _KEYS]
    if unknown or not isinstance(entry.get("class_name"), str):
        raise ConfigError(
            f"{where} must be {{class_name, config, tool_schema}}, got the keys {', '.join(map(str, entry))}"
        )
    where = f"{where} ({entry['class_name']!r})"
    config, schema = entry.get("config") or {}, entry.get("tool_schema")
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config must be a map, got {config!r}")
    if config.get("type", "native") != "native":
        raise ConfigError(f"{where}: config.type={config['type']!r} is not supported, only native tools are")
    return _built(where, lambda: _from_class(_object(entry["class_name"]), config, _checked(where, schema)))


def _checked(where: str, schema: Any) -> dict[str, Any] | None:
    try:
        return None if schema is None else checked_schema(schema)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _from_path(name: str, known: list[str]) -> BaseTool:
    where = f"rollout.multi_turn.tools: {name!r}"
    if "." not in name:
        raise ConfigError(
            f"{where} is no tool; known: {', '.join(known) or 'none'}. A function of your own is registered by "
            "@zagent.tool in a module that rollout.imports lists"
        )
    return _built(where, lambda: _from_object(_object(name)))


def _from_object(found: Any) -> BaseTool:
    if isinstance(found, BaseTool):
        return found
    if isinstance(found, type):
        return _from_class(found, {}, None)
    return find_registered(found) or FunctionTool(found)


def _from_class(found: Any, config: dict[str, Any], schema: dict[str, Any] | None) -> BaseTool:
    if not isinstance(found, type) or not issubclass(found, BaseTool):
        raise ConfigError(f"{found!r} is no subclass of zagent.BaseTool")
    return found(config, schema)


def _object(path: str) -> Any:
    from hydra.utils import get_object

    return get_object(path)


def _built(where: str, build: Callable[[], BaseTool]) -> BaseTool:
    try:
        with deadline(BUILD_DEADLINE_S):
            made = build()
        if not isinstance(getattr(made, "name", None), str):
            raise ConfigError(f"{type(made).__name__}.__init__ must call super().__init__(config, tool_schema)")
        checked_schema(made.get_openai_tool_schema())
    except _TooLate as error:
        raise ConfigError(f"{where} was not built within {BUILD_DEADLINE_S:g} s") from error
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error
    except BaseException as error:  # sys.exit() in a user's module too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{where}: {why(error)}") from error
    return made


class _TooLate(BaseException):
    """Not an Exception: what hangs is often a loop that tries again after every one of those."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `_TooLate` in the main thread after ``seconds``, again every second until it gets through. By a signal: a
    constructor may need the main thread (its event loop), so it cannot be run in another. Elsewhere: no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)
