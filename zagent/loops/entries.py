"""YAML files that list things of the user's: `{key: [entry, …]}`, each entry a mapping."""

from __future__ import annotations

import os
from typing import Any

from zagent.errors import ConfigError


def load_entries(path: str | os.PathLike[str], key: str = "", *, of: str) -> list[dict[str, Any]]:
    """The list under ``key`` of the file at ``path`` ("" = the file is the list), interpolations resolved. ``of`` is
    the configuration's key that names the file.

    Raises:
        ConfigError: no such file, no YAML, or no list of mappings there; names ``of``, the file and the entry.
    """
    import yaml
    from omegaconf import OmegaConf  # 0.1 s, and only for workers that are given files
    from omegaconf.errors import OmegaConfBaseException

    name = f"{of}={os.fspath(path)!r}"
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(os.fspath(path)), resolve=True)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{name} cannot be read: an entry contains itself, or entries are nested too deeply"
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if key:
        if not isinstance(loaded, dict) or key not in loaded:
            raise ConfigError(f"{name}: must be a mapping with the key {key!r}")
        loaded = loaded[key]
    if not isinstance(loaded, list):
        raise ConfigError(f"{name}: {key or 'the file'} must be a list")
    for number, entry in enumerate(loaded):
        if not isinstance(entry, dict):
            raise ConfigError(f"{name}: entry {number} must be a mapping, got {entry!r}")
    return loaded
