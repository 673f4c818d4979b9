"""The directory of a run: sockets, temporary files and the launcher's record; gone when the run is.

Names are short because an ipc endpoint is a path of at most 107 bytes. What a launcher that was killed left behind is
removed by the next one.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import processes
from launcher.record import FILE_NAME, Record
from zagent.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "zagent-"
SHARED_MEMORY = Path("/dev/shm")
#: A Unix socket's path: 108 bytes with the final NUL.
SOCKET_PATH_MAX = 107
#: Room for names below the run directory: the longest are SGLang's sockets, `/t/tmp` and 8 letters.
NAME_ROOM = 20
#: A directory without a record may be one that another launcher is making right now.
UNRECORDED_AGE_S = 3600.0
#: The module that cleans up after a launcher (launcher/janitor.py), as its command line names it.
JANITOR = b"launcher.janitor"
#: All that a run directory can hold; others may call theirs zagent-something as well.
OWN_NAMES = frozenset({FILE_NAME, f"{FILE_NAME}.draft", "children", "b", "t"})
#: Stray processes of a dead run get this long to vanish under SIGKILL.
STRAYS_GONE_S = 2.0


@dataclass(frozen=True, slots=True)
class RunDir:
    """``path`` (mode 0700) of the run ``run_id``; ``temporary`` within it is for children that leave files behind."""

    path: Path
    run_id: str

    @property
    def temporary(self) -> Path:
        return self.path / "t"

    def note_child(self, pid: int) -> None:
        """Remember a child of the launcher, for whoever cleans up after a launcher that was killed."""
        self._note(f"{pid}\n")

    def note_gone(self, pid: int) -> None:
        """Nothing of that child is left: its pid may become a stranger's."""
        self._note(f"-{pid}\n")

    def _note(self, line: str) -> None:
        try:
            with (self.path / "children").open("a") as file:
                file.write(line)
        except OSError as error:  # a full disk ends no run
            logger.error("cannot note a child in %s: %s", self.path, error)

    def children(self) -> set[int]:
        """Pids of the children there are; each leads a session."""
        found: set[int] = set()
        with suppress(FileNotFoundError):
            for line in (self.path / "children").read_text().splitlines():
                (found.discard if line.startswith("-") else found.add)(int(line.removeprefix("-")))
        return found


def candidates() -> list[Path]:
    """Where run directories may lie, best first: $TMPDIR, /tmp, /var/tmp."""
    places = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    return [Path(place) for place in dict.fromkeys(places) if os.path.isabs(place)]


def create(run_id: str, places: Sequence[Path] | None = None) -> RunDir:
    """A new directory in the first of ``places`` where it is short enough and can be made.

    Raises:
        ConfigError: none will do; says why for each.
    """
    refused: list[str] = []
    for place in candidates() if places is None else places:
        try:
            return _make(place, run_id)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            logger.warning("no run directory under %s", refused[-1])
    raise ConfigError(
        "no place for the run directory, set TMPDIR to a short path that can be written: " + "; ".join(refused)
    )


def _make(place: Path, run_id: str) -> RunDir:
    length = len(os.fsencode(place)) + 1 + len(PREFIX) + 8 + NAME_ROOM
    if length > SOCKET_PATH_MAX:
        raise OSError(f"too long for the sockets in it ({length} bytes, at most {SOCKET_PATH_MAX})")
    run = RunDir(Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)), run_id)  # mode 0700
    try:
        Record.own(run_id).save(run.path)
        run.temporary.mkdir()
    except OSError:
        _delete(run.path)
        raise
    return run


def remove(run: RunDir) -> None:
    """Delete the run's shared memory and then the directory, by which a sweep finds what is left."""
    _remove_shared_memory(run.run_id)
    _delete(run.path)


def sweep(places: Sequence[Path] | None = None) -> list[str]:
    """Remove what dead runs left: processes, shared memory, directories; their run ids. A living run's stay."""
    swept: list[str] = []
    for path in _own_directories(candidates() if places is None else places):
        record = Record.load(path)
        if record is None:
            _delete_if_old(path)
        elif record.is_dead() and not _has_janitor(record.run_id):
            _sweep_run(RunDir(path, record.run_id))
            swept.append(record.run_id)
    return swept


def _has_janitor(run_id: str) -> bool:
    """Whether the run's own janitor is at it: it knows the children's sessions, and finds strays that we would not."""
    return any(JANITOR in processes.command_line(process.pid) for process in processes.of_run(run_id))


def _sweep_run(run: RunDir) -> None:
    logger.info("run %s ended without cleaning up, removing what it left in %s", run.run_id, run.path)
    left = processes.kill_until_gone(lambda: processes.of_run(run.run_id), STRAYS_GONE_S)
    if left:
        logger.error("run %s left processes that do not end: %s", run.run_id, [p.pid for p in left])
    remove(run)


def _delete_if_old(path: Path) -> None:
    try:
        age = time.time() - path.stat().st_mtime
        names = set(os.listdir(path))
    except OSError:
        return
    if age > UNRECORDED_AGE_S and names <= OWN_NAMES:
        _delete(path)


def _own_directories(places: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        try:
            found += [path for path in place.glob(f"{PREFIX}*") if _is_own_directory(path)]
        except OSError as error:
            logger.warning("cannot look for old runs in %s: %s", place, error)
    return found


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_shared_memory(run_id: str) -> None:
    for path in SHARED_MEMORY.glob(f"*{run_id}*"):  # ours, and what SGLang names after the run
        _delete(path)


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # somebody else swept it at the same time
        pass
    except OSError as error:
        logger.error("cannot remove %s: %s", path, error)
