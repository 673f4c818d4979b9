"""What a hello says about its peer."""

from __future__ import annotations

from typing import Any

from zagent.broker.leases import Frames
from zagent.errors import DecodeError, ProtocolError
from zagent.wire.codec import decode_body
from zagent.wire.messages import LAST_VERSION, Hello

#: Largest facts, in bytes, of a peer without the join secret.
FACTS_MAX = 64 * 1024


def facts_of(hello: Hello, body: Frames, *, known: bool) -> dict[str, Any]:
    """The facts in its ``body``; ``known``: it has the join secret.

    Raises:
        ProtocolError: too many, or of no use.
        DecodeError: they are no map.
    """
    if sum(map(len, body)) > FACTS_MAX and not known:
        raise ProtocolError(f"a hello without the join secret has {FACTS_MAX} bytes of facts at most")
    facts = decode_body(body)
    if not isinstance(facts, dict):
        raise DecodeError("a hello's facts must be a map")
    version = facts.get("version", 0)
    if type(version) is not int or not 0 <= version <= LAST_VERSION:
        raise ProtocolError(f"{hello.name!r} is of version {version!r:.80}, and versions are 0 to {LAST_VERSION}")
    if not isinstance(facts.get("lacks", []), list):
        raise ProtocolError(f"{hello.name!r} lacks {facts['lacks']!r:.80}, which is no list")
    return facts
