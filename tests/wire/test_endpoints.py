"""One text says where the broker is and with what keys."""

from __future__ import annotations

import pytest

from zagent.wire.endpoints import Endpoint, parse


@pytest.mark.parametrize(
    ("text", "address", "keys", "path"),
    [
        ("ipc:///run/b", "ipc:///run/b", "", "/run/b"),
        ("ipc:///run/b?keys=/k", "ipc:///run/b?keys=/k", "", "/run/b?keys=/k"),
        ("tcp://host:5555", "tcp://host:5555", "", None),
        ("tcp://host:5555?keys=/a/b.client", "tcp://host:5555", "/a/b.client", None),
        ("tcp://[::1]:5?keys=/odd ä?keys=&%20", "tcp://[::1]:5", "/odd ä?keys=&%20", None),
        ("nonsense", "nonsense", "", None),
    ],
)
def test_an_endpoint_has_an_address_and_keys(text: str, address: str, keys: str, path: str | None) -> None:
    """All behind the first `?keys=` of a tcp endpoint is a path, letter by letter; and it is written as it was read."""
    endpoint = parse(text)
    assert endpoint == Endpoint(address, keys)
    assert endpoint.path == path
    assert str(endpoint) == text
