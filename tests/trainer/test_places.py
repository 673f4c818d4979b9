"""Which directories of weights nobody needs any more: by their names, by processes, and on a real file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zagent.trainer import places
from zagent.trainer.places import LEFT, UNKNOWN, Places, host, is_gone, is_useless, started_at, trainer_name

HERE, ELSEWHERE = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        (f"{HERE}-7-100-00000000", False),
        (f"{HERE}-7-99-00000000", True),  # that pid is another process's by now
        (f"{HERE}-8-100-00000000", True),
        (f"{ELSEWHERE}-8-100-00000000", False),
        (f"{UNKNOWN}-8-100-00000000", False),
        (f"{HERE}-8-100", False),
        ("source-4", False),
    ],
)
def test_a_trainer_has_gone_with_its_process(name: str, gone: bool) -> None:
    """On this host; of others, and of strangers' directories, nothing is known."""
    assert is_gone(name, HERE, {7: 100}.get) is gone


def test_nobody_is_judged_where_the_host_is_unknown() -> None:
    """Two of those may be two hosts."""
    assert not is_gone(f"{UNKNOWN}-8-100-00000000", UNKNOWN, {}.get)


@pytest.mark.parametrize(
    ("name", "useless"),
    [
        ("2-00000000", True),
        ("3-00000000", True),
        ("4-00000000", False),  # an engine may be at it
        ("4-00000000.draft", True),
        ("notes", False),
        ("2-mine", False),
    ],
)
def test_weights_up_to_those_that_are_served_are_useless(name: str, useless: bool) -> None:
    """And such as were never finished."""
    assert is_useless(name, 3) is useless


def test_a_process_knows_itself() -> None:
    """Its own trainers are there; each has a name of its own."""
    names = {trainer_name() for _ in range(3)}
    assert len(names) == 3
    assert not any(is_gone(name, host(), started_at) for name in names)


def test_processes_that_have_ended_have_no_start() -> None:
    """Those that nobody has waited for included."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert started_at(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started_at(process.pid) is None
    assert started_at(process.pid) is None


def test_a_host_that_tells_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, say."""

    def nothing(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", nothing)
    assert host() == UNKNOWN


# ---- directories ----------------------------------------------------------------------------------------------------


def written(run: Path, trainer: str, *names: str) -> Path:
    for name in names:
        (run / trainer / name).mkdir(parents=True)
    return run / trainer


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a trainer that has gone: no other process is there."""
    monkeypatch.setattr(places, "started_at", {}.get)
    return f"{host()}-8-100-00000000"


def test_what_gone_trainers_left_is_found(gone: str, tmp_path: Path) -> None:
    """A directory as a whole, where nothing of it is needed."""
    own = written(tmp_path, f"{host()}-7-100-00000000", "1-00000000")
    other = written(tmp_path, gone, "1-00000000", "2-00000000.draft")
    written(tmp_path, f"{ELSEWHERE}-8-100-00000000", "1-00000000")
    written(tmp_path, "source-4", "1-00000000")
    assert Places(own).left_by_others(3, str(own / "3-00000000")) == [other]


def test_what_engines_may_be_told_to_load_stays(gone: str, tmp_path: Path) -> None:
    """What they serve, whoever wrote it, and what they may serve yet."""
    other = written(tmp_path, gone, *(f"{version}-00000000" for version in range(1, 5)))
    found = Places(tmp_path / "own").left_by_others(3, str(other / "3-00000000"))
    assert sorted(path.name for path in found) == ["1-00000000", "2-00000000"]


def test_a_trainer_that_leaves_keeps_what_is_needed(tmp_path: Path) -> None:
    """As long as it is; others find it then, though the process is there."""
    place = written(tmp_path, trainer_name(), "1-00000000", "2-00000000")
    leaving, other = Places(place), Places(tmp_path / "own")
    assert other.left_by_others(2, "") == []
    assert leaving.leave({str(place / "2-00000000")}) == [place / "1-00000000"]
    (place / "1-00000000").rmdir()
    assert sorted(path.name for path in place.iterdir()) == ["2-00000000", LEFT]
    assert other.left_by_others(2, str(place / "2-00000000")) == []
    assert other.left_by_others(3, str(tmp_path / "own" / "3-00000000")) == [place]


def test_a_trainer_that_leaves_nothing_leaves_no_directory(tmp_path: Path) -> None:
    """Without a word."""
    place = written(tmp_path, trainer_name(), "1-00000000")
    assert Places(place).leave(set()) == [place]
    assert [path.name for path in place.iterdir()] == ["1-00000000"]


def test_each_write_has_a_place_of_its_own(tmp_path: Path) -> None:
    """Which `is_useless` knows."""
    names = {Places(tmp_path).new(3).name for _ in range(3)}
    assert len(names) == 3
    assert all(is_useless(name, 3) for name in names)
