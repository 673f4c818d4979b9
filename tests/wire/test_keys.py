"""Key files are read whole, or refused with their name and what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.key_files import both, written
from zagent.errors import ConfigError
from zagent.wire.keys import BrokerKeys, generate, read_broker, read_client, to_text


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Both files; the client's has no key of the broker's but the public one."""
    path, keys = both(tmp_path / "k")
    assert read_broker(path) == keys
    assert read_client(f"{path}.client") == keys.client
    assert keys.broker_secret not in (tmp_path / "k.client").read_text()


def test_keys_are_new_each_time() -> None:
    """All four."""
    assert not set(generate()) & set(generate())


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o601, 0o644])
def test_a_file_that_others_can_open_is_refused(mode: int, tmp_path: Path) -> None:
    """Both kinds; the error has the mode and what to do."""
    keys = generate()
    for read, contents in ((read_broker, keys), (read_client, keys.client)):
        path = written(tmp_path / "k", contents, mode)
        with pytest.raises(ConfigError, match=rf"'{path}' is open to others \(mode {mode:04o}\): chmod 600"):
            read(path)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """He could have written anything into it."""
    path, _ = both(tmp_path / "k")
    os.chown(path, 12345, 0)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\)"):
        read_broker(path)


KEYS = generate()
OTHER = generate()
DAMAGED: dict[str, tuple[Any, str]] = {
    "missing": (None, "cannot be read: No such file"),
    "no text": (b"\xff\xfe", "is none of ours"),
    "no toml": (b"broker_public", "is none of ours"),
    "the client's": (to_text(KEYS.client).encode(), "has no broker_secret"),
    "a number": (to_text(KEYS).replace(f'"{KEYS.broker_secret}"', "7").encode(), "has no broker_secret"),
    "short": (to_text(KEYS._replace(client_secret="x")).encode(), "has no client_secret"),
    "no Z85": (to_text(KEYS._replace(broker_public="#" * 40)).encode(), "has no broker_public"),
    "two runs'": (to_text(KEYS._replace(broker_secret=OTHER.broker_secret)).encode(), "do not belong together"),
    "two clients'": (to_text(KEYS._replace(client_public=OTHER.client_public)).encode(), "do not belong together"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    """By path, with what is wrong; no key is quoted."""
    contents, message = DAMAGED[case]
    path = tmp_path / "k"
    if contents is not None:
        path.write_bytes(contents)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as caught:
        read_broker(str(path))
    assert str(path) in str(caught.value)
    assert not any(key in str(caught.value) for key in KEYS)


def test_a_client_file_of_two_runs_is_refused(tmp_path: Path) -> None:
    """Its pair at least must fit."""
    mixed = BrokerKeys(*KEYS)._replace(client_secret=OTHER.client_secret).client
    with pytest.raises(ConfigError, match="do not belong together"):
        read_client(written(tmp_path / "k.client", mixed))
