"""The launcher makes the key files that are missing, and refuses those that are no good."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.keys import prepared
from support.key_files import written
from zagent import Config
from zagent.errors import ConfigError
from zagent.wire.keys import generate, read_broker, read_client


def config(path: str) -> Config:
    return Config.load(overrides=["broker.endpoint=tcp://127.0.0.1:0", f"broker.keys={path}"])


def test_both_files_are_made_for_their_owner_only(tmp_path: Path) -> None:
    """Whatever the umask; nothing else is left beside them."""
    before = os.umask(0)
    try:
        prepared(config(f"{tmp_path}/k"))
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["k", "k.client"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert read_client(f"{tmp_path}/k.client") == read_broker(f"{tmp_path}/k").client


def test_files_that_are_there_are_used(tmp_path: Path) -> None:
    """Several runs may share them."""
    prepared(config(f"{tmp_path}/k"))
    first = (tmp_path / "k").read_text(), (tmp_path / "k.client").read_text()
    prepared(config(f"{tmp_path}/k"))
    assert ((tmp_path / "k").read_text(), (tmp_path / "k.client").read_text()) == first


def test_a_client_file_that_is_gone_is_made_again(tmp_path: Path) -> None:
    """The same one: copies on other hosts stay good."""
    prepared(config(f"{tmp_path}/k"))
    before = (tmp_path / "k.client").read_text()
    (tmp_path / "k.client").unlink()
    prepared(config(f"{tmp_path}/k"))
    assert (tmp_path / "k.client").read_text() == before


def test_the_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to other processes, in the endpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}")
    assert prepared(config("k")).broker.keys == f"{tmp_path}/k"
    assert prepared(config("~/k")).broker.keys == f"{tmp_path}/k"
    assert prepared(Config.load()).broker.keys is None


def test_what_is_wrong_with_a_file_is_said_with_the_key(tmp_path: Path) -> None:
    """A file that others can read, one that cannot be made, a client file of another run."""
    written(tmp_path / "open", generate(), 0o644)
    with pytest.raises(ConfigError, match=r"^broker.keys: key file .*open' is open to others"):
        prepared(config(f"{tmp_path}/open"))
    with pytest.raises(ConfigError, match=r"^broker.keys: key file '/no/dir/k' cannot be made: No such file"):
        prepared(config("/no/dir/k"))
    written(tmp_path / "k.client", generate().client)
    with pytest.raises(ConfigError, match=r"^broker.keys: .*k.client' is not the client file of .*k': delete it"):
        prepared(config(f"{tmp_path}/k"))


def test_two_launchers_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the one who was first is used by both."""
    link, theirs = os.link, generate()

    def lose(source: str, target: str) -> None:
        written(Path(target), theirs)
        link(source, target)

    monkeypatch.setattr(os, "link", lose)
    written(tmp_path / "k.client", theirs.client)
    prepared(config(f"{tmp_path}/k"))
    assert read_broker(f"{tmp_path}/k") == theirs
    assert sorted(os.listdir(tmp_path)) == ["k", "k.client"]
