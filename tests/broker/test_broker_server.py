"""The thin loop around the core: feed, send, and tell the core what could not be sent."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.broker_driver import SECRET, Driver, driver, nonce_of, sent
from zagent import __version__, alive
from zagent.broker.record import Assignment, Recorder
from zagent.broker.server import _recorder, deliver, feed, serve
from zagent.errors import ConfigError, Refused
from zagent.wire.codec import decode_header, encode_body, encode_header
from zagent.wire.messages import Call, Failure, Hello

CALLER, M0, M1 = nonce_of("caller"), nonce_of("m0", 1), nonce_of("m1", 1)


class Router:
    """Delivers to whoever is not in ``gone``."""

    def __init__(self, *gone: bytes) -> None:
        self.gone = set(gone)
        self.sent: list[tuple[bytes, Any]] = []
        self.batches: list[list[Any]] = []

    def send(self, identity: bytes, frames: Any) -> bool:
        if identity in self.gone:
            return False
        self.sent.append((identity, frames))
        return True

    def turned_away(self) -> int:
        return 3

    def receive(self, timeout_ms: int) -> list[Any]:
        return self.batches.pop(0) if self.batches else []


def started() -> Driver:
    d = driver()
    for name in ("m0", "m1"):
        d.join(name)
    d.caller()
    return d


def a_call(call: bytes = b"1") -> list[Any]:
    return [encode_header(Call(CALLER + call, 1, "engine", "generate")), *encode_body(None)]


def test_what_cannot_be_delivered_fails_to_its_caller() -> None:
    """The member is gone: that nobody has begun the call goes out in the same breath (pitfall I7)."""
    d, router = started(), Router(b"d" + M0)
    feed(d.core, router, [(b"d" + CALLER, a_call())], 0.0)
    (answer,) = [sent(to, frames) for to, frames in router.sent]
    assert (answer.to, answer.message) == (b"d" + CALLER, Failure(b"1", 1, False))
    assert isinstance(answer.error, Refused)
    assert not d.member("m0").takes_calls


def test_a_chain_of_undeliverables_ends() -> None:
    """Both members and the caller are gone: every count is zero, nothing is sent."""
    d, router = started(), Router(b"d" + M0, b"d" + M1, b"d" + CALLER, b"c" + CALLER)
    feed(d.core, router, [(b"d" + CALLER, a_call(b"%d" % i)) for i in range(3)], 0.0)
    assert router.sent == []
    assert d.quiet()


def test_one_bad_message_does_not_stop_a_batch() -> None:
    """What follows it is handled."""
    d, router = started(), Router()
    feed(d.core, router, [(b"d" + CALLER, []), (b"", [b"\xc1"]), (b"d" + CALLER, a_call())], 0.0)
    assert [to for to, _ in router.sent] == [b"d" + M0]
    assert d.core.counters["malformed"] == 2


def test_deliver_sends_in_order() -> None:
    """As the core said."""
    d, router = started(), Router()
    deliver(d.core, router, [(b"a", [b"1"]), (b"b", [b"2"]), (b"a", [b"3"])], 0.0)
    assert router.sent == [(b"a", [b"1"]), (b"b", [b"2"]), (b"a", [b"3"])]


def test_the_loop_feeds_and_ticks_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are answered, overdue calls end without any message coming in, and every turn is a sign of life."""
    d, router, turns = driver(), Router(), []
    monkeypatch.setattr(alive, "mark", lambda: turns.append(len(router.batches)))
    hello = [encode_header(Hello("", "x", 0, 0, SECRET, __version__)), *encode_body({})]
    overdue = [encode_header(Call(CALLER + b"1", 1, "engine", "generate", "", 0)), *encode_body(None)]
    router.batches = [[(b"d" + CALLER, hello)], [(b"c" + CALLER, hello), (b"d" + CALLER, overdue)]]

    def kinds() -> list[str]:
        return [type(decode_header(frames[0])).__name__ for _, frames in router.sent]

    serve(d.core, router, time.monotonic, lambda: "Failure" in kinds())  # type: ignore[arg-type]
    assert [kind for kind in kinds() if kind != "Pulse"] == ["Welcome", "Failure"]
    assert d.core.counters["turned_away"] == 3  # what the socket has counted
    assert turns[:3] == [2, 1, 0]


def test_the_record_is_json_lines(tmp_path: Path) -> None:
    """One per assignment, readable while the broker runs; none without a path."""
    path = tmp_path / "record.jsonl"
    assignment = Assignment(1.5, "engine", "s", "m0", "new", {"m0": 0})
    with ExitStack() as resources:
        write = _recorder(str(path), resources)
        assert write is not None
        write(assignment)
        assert json.loads(path.read_text()) == assignment._asdict()
        assert _recorder(None, resources) is None


def test_a_record_that_cannot_be_written_is_named() -> None:
    """By its key, before anything is served."""
    with (
        ExitStack() as resources,
        pytest.raises(ConfigError, match=r"routing.record='/no/r' cannot be written: No such"),
    ):
        _recorder("/no/r", resources)


def test_a_full_disk_ends_the_record_and_not_the_broker(capsys: pytest.CaptureFixture[str]) -> None:
    """Said once; assignments go on."""
    recorder = Recorder(Path("/dev/full"))
    for _ in range(3):
        recorder.write(Assignment(0.0, "engine", "s", "engine-0", "new", {}))
    recorder.close()
    assert capsys.readouterr().err.count("routing.record ends here") == 1
