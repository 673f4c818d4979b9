"""Run directories, records and log directories: short, private, swept when their run is dead."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher import logs, rundir
from launcher.record import FILE_NAME, Record
from support.processes import Popen, eventually, running
from zagent.errors import ConfigError


@pytest.fixture
def dead() -> Record:
    """The record of a launcher that has ended; its pid is most likely free."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return replace(Record.own("20200101-000000-deadbeef"), pid=ended.pid)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory; pytest's own are too long for sockets on some machines."""
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="zt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def leave(place: Path, record: Record) -> Path:
    """A run directory as a killed launcher leaves it."""
    path = place / f"{rundir.PREFIX}abandoned"
    path.mkdir()
    (path / "b").touch()
    record.save(path)
    return path


def test_run_directory_is_private_short_and_recorded(place: Path) -> None:
    """Mode 0700, room for socket names within 107 bytes, the launcher's pid and start time in it."""
    run = rundir.create("run-1", [place])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert len(os.fsencode(run.temporary / "tmpabcdefgh")) <= 107
    assert json.loads((run.path / FILE_NAME).read_text()) == asdict(Record.own("run-1"))
    assert run.temporary.is_dir()


def test_children_are_noted_until_they_are_gone(place: Path) -> None:
    """A pid that is given again counts again."""
    run = rundir.create("run-1", [place])
    assert run.children() == set()
    for note, pid in ((run.note_child, 7), (run.note_child, 70), (run.note_gone, 7), (run.note_gone, 70)):
        note(pid)
    run.note_child(70)
    assert run.children() == {70}


def test_a_child_that_cannot_be_noted_is_logged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk, a directory that somebody has removed: the run goes on."""
    rundir.RunDir(place / "missing", "run-1").note_child(7)
    assert "cannot note a child" in caplog.text


def test_two_runs_at_once_do_not_meet(place: Path) -> None:
    """Each has a directory of its own, and neither sweeps the other's."""
    first, second = rundir.create("run-1", [place]), rundir.create("run-2", [place])
    assert rundir.sweep([place]) == []
    assert first.path.is_dir()
    assert second.path.is_dir()
    assert first.path != second.path


def test_long_tmpdir_falls_back(place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A TMPDIR too long for sockets is passed over, and the log says so."""
    deep = place / ("x" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert rundir.candidates()[:2] == [deep, Path("/tmp")]
    run = rundir.create("run-1", [deep, place])
    assert run.path.parent == place
    assert "too long for the sockets" in caplog.text
    assert list(deep.iterdir()) == []


def test_no_usable_place_is_a_clear_error(place: Path) -> None:
    """The message gives each place with its reason, and what to set."""
    with pytest.raises(ConfigError, match=r"TMPDIR.*missing.*No such file.*xxx.*too long"):
        rundir.create("run-1", [place / "missing", place / ("x" * 120)])


def test_relative_tmpdir_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children may run elsewhere."""
    monkeypatch.setenv("TMPDIR", "here")
    assert rundir.candidates() == [Path("/tmp"), Path("/var/tmp")]


def test_a_dead_runs_directory_and_shared_memory_are_swept(place: Path, dead: Record) -> None:
    """What a killed launcher left is removed by the next."""
    path = leave(place, dead)
    memory = rundir.SHARED_MEMORY / f"{rundir.PREFIX}{dead.run_id}-weights"
    memory.touch()
    assert rundir.sweep([place]) == [dead.run_id]
    assert not path.exists()
    assert not memory.exists()


def test_a_run_that_its_own_janitor_cleans_up_is_left_to_it(place: Path, dead: Record) -> None:
    """It knows the children's sessions; a sweep that killed it and took its record would leave strays for good."""
    janitor = [sys.executable, "-S", "-c", "import time; time.sleep(600)", "launcher.janitor"]
    with Popen(janitor, env={**os.environ, "ZAGENT_RUN_ID": dead.run_id}) as process:
        eventually(lambda: dead.run_id in Path(f"/proc/{process.pid}/environ").read_text())
        path = leave(place, dead)
        assert rundir.sweep([place]) == []
        assert running(process.pid)
        process.kill()
        process.wait()
    assert rundir.sweep([place]) == [dead.run_id]
    assert not path.exists()


def test_processes_of_a_dead_run_are_swept(place: Path, dead: Record) -> None:
    """Strays are found by the run id in their environment."""
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with Popen(sleeper, env={**os.environ, "ZAGENT_RUN_ID": dead.run_id}) as stray:
        # until exec the entry in /proc still has our own environment
        eventually(lambda: dead.run_id in Path(f"/proc/{stray.pid}/environ").read_text())
        leave(place, dead)
        rundir.sweep([place])
        assert not running(stray.pid)


def test_a_living_run_is_never_swept(place: Path) -> None:
    """As long as its launcher lives, nothing is touched."""
    path = leave(place, Record.own("run-1"))
    assert rundir.sweep([place]) == []
    assert (path / "b").exists()


def test_a_reused_pid_does_not_keep_a_dead_run(place: Path) -> None:
    """The same pid with another start time is another process."""
    mine = Record.own("20200101-000000-0badcafe")
    path = leave(place, replace(mine, start_time=mine.start_time - 1))
    assert rundir.sweep([place]) == [mine.run_id]
    assert not path.exists()


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}])
def test_what_cannot_be_judged_is_left_alone(place: Path, dead: Record, change: dict[str, str]) -> None:
    """A pid of another host or container says nothing here."""
    path = leave(place, replace(dead, **change))  # type: ignore[arg-type]
    assert rundir.sweep([place]) == []
    assert path.exists()


def test_a_run_of_an_earlier_boot_is_dead(place: Path) -> None:
    """No process survives a reboot."""
    leave(place, replace(Record.own("run-1"), boot_id="earlier"))
    assert rundir.sweep([place]) == ["run-1"]


def test_a_directory_without_a_record_is_spared_while_young(place: Path) -> None:
    """Another launcher may be making it right now; after an hour it is rubbish."""
    path = place / f"{rundir.PREFIX}new"
    path.mkdir()
    rundir.sweep([place])
    assert path.exists()
    os.utime(path, (0, 0))
    rundir.sweep([place])
    assert not path.exists()


def test_links_and_foreign_names_are_not_followed(place: Path, dead: Record) -> None:
    """A link with our prefix is not ours to follow."""
    target = place / "precious"
    target.mkdir()
    dead.save(target)
    (place / f"{rundir.PREFIX}link").symlink_to(target)
    assert rundir.sweep([place]) == []
    assert target.exists()


def test_remove_takes_directory_and_shared_memory_and_repeats(place: Path) -> None:
    """Removing is complete, and harmless the second time."""
    run = rundir.create("20200101-000000-01234567", [place])
    (run.temporary / "tmpsocket").touch()
    names = (f"{rundir.PREFIX}{run.run_id}", f"sglang_loads_{run.run_id}-0a1b_2c.shm")
    memory = [rundir.SHARED_MEMORY / name for name in names]
    for file in memory:
        file.touch()
    rundir.remove(run)
    rundir.remove(run)
    assert not run.path.exists()
    assert not any(file.exists() for file in memory)


def test_the_directory_goes_last(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while it removes leaves a trace for the next sweep."""
    run = rundir.create("20200101-000000-01234567", [place])
    memory = rundir.SHARED_MEMORY / f"{rundir.PREFIX}{run.run_id}"
    memory.touch()
    there: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda _path: there.append(memory.exists()))
        rundir.remove(run)
    assert there == [False]


def test_run_ids_are_unique() -> None:
    """Two runs in one second differ."""
    assert logs.new_run_id() != logs.new_run_id()


def test_log_directory_is_under_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$XDG_STATE_HOME decides; without it ~/.local/state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert logs.create(None, "r", keep=10) == tmp_path / "zagent/logs/r"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert logs.default_root() == Path("/home/somebody/.local/state/zagent/logs")


def test_the_last_runs_logs_are_kept(tmp_path: Path, dead: Record) -> None:
    """logs.keep runs stay, the present one among them; living runs and other people's files always."""
    for day in range(1, 6):
        path = tmp_path / f"2020010{day}-000000-0000000{day}"
        path.mkdir()
        (Record.own("x") if day == 1 else dead).save(path)
    (tmp_path / "notes").mkdir()
    logs.create(tmp_path, "20200109-000000-00000009", keep=3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [name[:8] for name in left] == ["20200101", "20200104", "20200105", "20200109", "notes"]


def test_log_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    """The message names the path and the key."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/r.*set logs.dir"):
        logs.create(tmp_path / "file", "r", keep=1)


def test_tail_is_the_last_forty_lines(tmp_path: Path) -> None:
    """Also of a long log with bytes that are no text; an absent file has none."""
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100_000 + b"\n" + b"".join(b"line %d\n" % i for i in range(100)))
    assert logs.tail(log).splitlines() == [f"line {i}" for i in range(60, 100)]
    assert logs.tail(tmp_path / "absent") == ""
