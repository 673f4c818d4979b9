"""Log files: one per child, in a directory per run that outlives the run."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from launcher.record import Record
from zagent.errors import ConfigError

logger = logging.getLogger(__name__)

#: Lines of a log that an error quotes, and bytes that are read to find them.
TAIL_LINES = 40
TAIL_BYTES = 64 * 1024

_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def new_run_id() -> str:
    """Unique on this host; sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def default_root() -> Path:
    """`$XDG_STATE_HOME/zagent/logs`, by default `~/.local/state/zagent/logs`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()) / "zagent" / "logs"


def create(root: Path | None, run_id: str, keep: int) -> Path:
    """The run's log directory, made; of older runs the last ``keep`` − 1 stay, and all that still live.

    Raises:
        ConfigError: it cannot be made; names `logs.dir`.
    """
    root = default_root() if root is None else root.expanduser().absolute()
    path = root / run_id
    try:
        path.mkdir(parents=True, mode=0o700)
        Record.own(run_id).save(path)
    except OSError as error:
        raise ConfigError(f"cannot make the log directory {path}: {error.strerror or error}; set logs.dir") from error
    _prune(root, keep)
    return path


def _prune(root: Path, keep: int) -> None:
    runs = sorted(path for path in root.iterdir() if _RUN_ID.fullmatch(path.name) and path.is_dir())
    for path in runs[:-keep]:
        record = Record.load(path)
        if record is not None and record.is_dead():
            shutil.rmtree(path, onerror=_report)


def _report(_function: object, path: str, error: object) -> None:
    if not (isinstance(error, tuple) and isinstance(error[1], FileNotFoundError)):  # another launcher prunes as well
        logger.warning("cannot remove the old log %s: %s", path, error)


def tail(path: Path) -> str:
    """The last `TAIL_LINES` lines; empty if there are none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def quoted(path: Path) -> str:
    """The tail as an error message quotes it."""
    text = tail(path)
    return f"\n--- last lines of {path} ---\n{text}" if text else f" ({path} is empty)"
