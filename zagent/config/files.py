"""YAML files and ``key=value`` overrides as plain data. Apart from the sections, for only who is given files needs
OmegaConf."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zagent.config.explain import explain_value, explain_yaml
from zagent.errors import ConfigError


def merged(path: str | os.PathLike[str] | None, overrides: Iterable[str]) -> Any:
    """YAML at ``path``, then ``overrides``, interpolations resolved. Raises `ConfigError`."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list of key=value, got the text {overrides!r}")
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"the configuration's path must be text, got a {type(path).__name__}; see Config.from_dict")
    together = OmegaConf.create({})
    if path is not None:
        together = OmegaConf.merge(together, _read(path))  # type: ignore[assignment]
    together = OmegaConf.merge(together, _dotlist(overrides))  # type: ignore[assignment]
    try:
        return OmegaConf.to_container(together, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from error


def _read(path: str | os.PathLike[str]) -> Any:
    name = os.fspath(path)
    try:
        loaded = OmegaConf.load(name)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{name}: {explain_yaml(error)}") from error
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{name}: must be a mapping of sections")
    return loaded


def _dotlist(overrides: Iterable[str]) -> Any:
    made = OmegaConf.create({})
    for entry in overrides:
        if "=" not in entry or entry.startswith("="):
            raise ConfigError(f"override {entry!r} is not of the form key=value")
        try:
            made.merge_with_dotlist([entry])
        except YAMLError as error:
            raise ConfigError(f"override {entry!r}: {explain_yaml(error)}") from error
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"override {entry!r}: {explain_value(error)}") from error
    return made
