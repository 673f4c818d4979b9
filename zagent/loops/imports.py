"""Why a user's module cannot be imported, told by the user's own lines."""

from __future__ import annotations

import re
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any

from zagent.errors import CallerError, ConfigError

#: Frames on the way to the user's module, and in hydra, which looks it up for us.
_NOT_THE_USERS = ("<frozen importlib", "/importlib/__init__.py", "/hydra/_internal/", "/hydra/utils.py", __file__)


def import_listed(name: str) -> ModuleType:
    """The module ``name`` of `rollout.imports`.

    Raises:
        ConfigError: there is none, or it fails (`sys.exit` included); with the traceback of the user's code.
    """
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"rollout.imports: {name!r} cannot be imported: {why(error)}") from error


def find_object(key: str, path: str) -> Any:
    """The class or function at the dotted ``path`` that the configuration's ``key`` names. Raises `ConfigError` as
    `find_named` does."""
    return find_named(f"{key}={path!r}", path, ConfigError)


def find_named(what: str, path: str, error_class: type[CallerError]) -> Any:
    """The class or function at the dotted ``path``, which errors call ``what``.

    Raises:
        CallerError: an ``error_class``: there is none, or it cannot be called; with the traceback of the user's code.
    """
    from hydra.utils import get_object

    try:
        found = get_object(path)
    except (Exception, SystemExit) as error:  # hydra wraps import errors of all kinds
        raise error_class(f"{what} cannot be imported: {why(error)}") from error
    if not callable(found):
        raise error_class(f"{what} is a {type(found).__name__}, neither class nor function")
    return found


def why(error: BaseException) -> str:
    """What went wrong in an import: the error, and the traceback of the imported code where the fault lies in that.

    Hydra's wrappers are taken off.
    """
    while error.__cause__ is not None and _is_wrapper(error):
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(p in f.filename for p in _NOT_THE_USERS)]
    said = "".join(traceback.format_exception_only(error)).strip()
    if not frames and not isinstance(error, SyntaxError):
        missing = re.search(r"No module named '(.+)\.(\w+)'; '\1' is not a package", said)
        return f"module {missing[1]!r} has no {missing[2]!r}" if missing else said
    return (
        f"{said.splitlines()[-1]}\nTraceback (most recent call last):\n" + "".join(traceback.format_list(frames)) + said
    )


def _is_wrapper(error: BaseException) -> bool:
    return type(error).__module__.startswith("hydra") or str(error).startswith("Error loading ")
