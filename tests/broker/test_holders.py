"""Who holds gates, from one broker to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from zagent.broker.holders import HoldersFile


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    """Nobody, where nobody ever held any; and nothing else is left in the directory."""
    file = HoldersFile(tmp_path / "holders")
    assert file.read() == []
    for holders in ([b"\x00\x01\x02\n", b"........"], [b"\xff" * 8], []):
        file.write(holders)
        assert HoldersFile(tmp_path / "holders").read() == holders
    assert [path.name for path in tmp_path.iterdir()] == ["holders"]


def test_a_file_that_is_none_of_ours_names_nobody(tmp_path: Path) -> None:
    """The broker starts all the same."""
    (tmp_path / "holders").write_text("no hex", encoding="ascii")
    assert HoldersFile(tmp_path / "holders").read() == []


def test_a_directory_that_is_gone_does_not_end_the_broker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says so in its log."""
    HoldersFile(tmp_path / "nowhere" / "holders").write([b"........"])
    assert "who holds gates could not be written" in capfd.readouterr().err
