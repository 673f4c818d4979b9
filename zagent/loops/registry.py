"""Agent loops by name.

A row names its loop by registered name (`@register("my_agent")`, in a module listed under `rollout.imports`), by an
entry of the YAML file at `rollout.agent_loop_config_path` (a list of `{name, _target_, …constructor arguments}`), or by
dotted path. Processes do not share memory, so names cross them as such and are resolved in the worker.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from zagent.errors import ConfigError, UnknownAgent
from zagent.loops.entries import load_entries
from zagent.loops.imports import find_named, why

Loop = TypeVar("Loop", bound=type)

#: zagent's own loops, by the module that registers them.
BUILT_IN = {
    "single_turn_agent": "zagent.loops.single_turn",
    "tool_agent": "zagent.loops.tool",
    "env_agent": "zagent.loops.environment",
}

_REGISTRY: dict[str, Callable[..., Any]] = {}
#: Base classes of other frameworks' loops, and what makes one of ours of them.
_ADOPTED: dict[type, Callable[[Callable[..., Any], Mapping[str, Any]], Any]] = {}


def register(name: str) -> Callable[[Loop], Loop]:
    """Class decorator: rows may name this loop ``name``. A later registration of the same name wins."""

    def decorate(cls: Loop) -> Loop:
        _REGISTRY[name] = cls
        return cls

    return decorate


def adopt(base: type, build: Callable[[Callable[..., Any], Mapping[str, Any]], Any]) -> None:
    """Loops whose classes derive from ``base``, of another framework, are made by ``build(factory, keywords)``."""
    _ADOPTED[base] = build


def register_file(path: str | os.PathLike[str]) -> None:
    """Register the entries of an agent loop config file.

    Raises:
        ConfigError: no such file, or an entry without `name` or `_target_`, or whose `_target_` cannot be made.
    """
    for number, entry in enumerate(load_entries(path, of="rollout.agent_loop_config_path")):
        if not {"name", "_target_"} <= set(entry):
            raise ConfigError(f"{os.fspath(path)}: entry {number} needs name and _target_, got {entry!r}")
        spec = {str(key): value for key, value in entry.items() if key != "name"}
        try:
            _REGISTRY[str(entry["name"])] = _from_spec(spec)
        except Exception as error:  # hydra wraps whatever the class's module raises
            raise ConfigError(f"{os.fspath(path)}: entry {number} ({entry['name']!r}): {why(error)}") from error


def _from_spec(spec: dict[str, Any]) -> Callable[..., Any]:
    """Hydra's instantiate: nested `_target_`s become objects; the loop's own arguments come when it is built."""
    from hydra.utils import instantiate

    made = instantiate({**spec, "_partial_": True}, _convert_="all")
    return made if isinstance(made, partial) else partial(made)


def find_loop(name: str) -> Callable[..., Any]:
    """The loop a row means by ``name``.

    Raises:
        UnknownAgent: lists the known names; or the dotted path cannot be imported, and why.
    """
    if name in BUILT_IN and name not in _REGISTRY:
        import_module(BUILT_IN[name])
    if name in _REGISTRY:
        return _REGISTRY[name]
    if "." not in name:
        known = ", ".join(sorted({*_REGISTRY, *BUILT_IN}))
        raise UnknownAgent(
            f"no agent loop {name!r}; known: {known}. A loop of your own is registered in a module that "
            "rollout.imports lists"
        )
    return find_named(f"agent loop {name!r}", name, UnknownAgent)  # type: ignore[no-any-return]


def build_loop(name: str, keywords: Mapping[str, Any]) -> Any:
    """An instance of the loop ``name`` with those of ``keywords`` that its constructor takes."""
    factory = find_loop(name)
    cls = factory.func if isinstance(factory, partial) else factory
    for base, build in _ADOPTED.items():
        if isinstance(cls, type) and issubclass(cls, base):
            return build(factory, keywords)
    return factory(**accepted(factory, keywords))


def accepted(factory: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The ``keywords`` that ``factory`` takes (all of them if it has ``**kwargs``)."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(keywords)
    return {key: value for key, value in keywords.items() if key in parameters}
