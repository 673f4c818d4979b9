"""The key files of a broker over TCP: made where there are none, refused where others could read them."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

from zagent.config import Config
from zagent.errors import ConfigError
from zagent.wire import keys
from zagent.wire.keys import CLIENT_SUFFIX


def prepared(config: Config) -> Config:
    """``config`` with the absolute path of its key file, which is there now, and so is its client file.

    Raises:
        ConfigError: a file is open to others, damaged, or cannot be made, or the two do not belong together.
    """
    if config.broker.keys is None:
        return config
    path = os.path.abspath(os.path.expanduser(config.broker.keys))
    try:
        _prepare(path)
    except ConfigError as error:
        raise ConfigError(f"broker.keys: {error}") from error
    return config.model_copy(update={"broker": config.broker.model_copy(update={"keys": path})})


def _prepare(path: str) -> None:
    if not os.path.lexists(path):
        _create(path, keys.to_text(keys.generate()))
    broker = keys.read_broker(path)
    client = path + CLIENT_SUFFIX
    if not os.path.lexists(client):
        _create(client, keys.to_text(broker.client))
    if keys.read_client(client) != broker.client:
        raise ConfigError(f"{client!r} is not the client file of {path!r}: delete it, and it is made anew")


def _create(path: str, text: str) -> None:
    """A whole file or none, for its owner only; that of another launcher which makes it right now is as good."""
    try:
        opened, draft = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".keys-")  # mode 0600
        with open(opened, "w") as file:
            file.write(text)
        try:
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(f"key file {path!r} cannot be made: {error.strerror or error}") from error
