"""Another interpreter for engines (`engine.python`): which engines run under it, and whether it will do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from launcher.engines import python_of
from zagent import __version__
from zagent.config import Config
from zagent.errors import ConfigError

#: Seconds for a few imports, maybe from a cold network disk.
ANSWER_S = 60.0
#: Variables that make an interpreter look for modules where another one has its own.
_OTHERS_MODULES = ("PYTHONPATH", "PYTHONHOME")

#: Asked with our version and the kind of engine. Another version's modules may have other names, so it comes first.
_QUESTION = """
import json, sys
import zagent, launcher.entry
wrong = ""
if zagent.__version__ == sys.argv[1] and sys.argv[2] == "sglang":
    from zagent.engine.sglang_arguments import check_version
    try:
        check_version()
    except Exception as error:
        wrong = str(error)
print(json.dumps([zagent.__version__, wrong]))
"""


def check_interpreters(config: Config) -> None:
    """Ask each interpreter that engines are to run under whether it can.

    Raises:
        ConfigError: there is no such interpreter, it does not answer, has no zagent or another version of it, or no
            sglang where engines need that; names the key and the interpreter.
    """
    wanted = {(python_of(config.engine), config.engine.kind): "engine"}
    for name, service in config.services.items():
        if service.engine is not None:
            key = (python_of(service.engine, config.engine), service.engine.kind)
            wanted.setdefault(key, f"services.{name}.engine" if service.engine.python else "engine")
    for (python, kind), section in wanted.items():
        if python:
            _check(f"{section}.python={python}", python, kind)


def _check(what: str, python: str, kind: str) -> None:
    version, wrong = _ask(what, python, kind)
    if version != __version__:
        raise ConfigError(
            f"{what} has zagent {version}, and this is zagent {__version__} under {sys.executable}: install the same "
            "version in both"
        )
    if wrong:
        raise ConfigError(f"{what}: {wrong}")


def _ask(what: str, python: str, kind: str) -> tuple[str, str]:
    """(its version of zagent, what is wrong)"""
    command = [python, "-P", "-c", _QUESTION, __version__, kind]
    try:
        answer = subprocess.run(
            command,
            env=environment_of(python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} did not answer within {ANSWER_S:g} s") from None
    except OSError as error:
        raise ConfigError(f"{what} cannot be run: {error.strerror or error}") from error
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        said = answer.stderr.strip().splitlines()[-1:] or [f"it exited with code {answer.returncode}"]
        raise ConfigError(f"{what} cannot import zagent, of which it needs {__version__}: {said[0]}")
    version, wrong = json.loads(lines[-1])
    return version, wrong


def environment_of(python: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment and ``extra`` for ``python``: with its own modules only, and its own programs first (`ninja`)."""
    made = {name: value for name, value in os.environ.items() if name not in _OTHERS_MODULES}
    path = os.pathsep.join(filter(None, [os.path.dirname(python), made.get("PATH", "")]))
    return {**made, "PATH": path, **(extra or {})}
