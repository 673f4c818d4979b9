"""Random, mutated and untrue messages: none of them ends a process, or changes a token of the traffic beside them.

`ZAGENT_FUZZ` says how many.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from benchmarks.attacker import Attack
from benchmarks.fuzz import Fuzz
from benchmarks.hostile import Siege
from benchmarks.processes import Processes
from support.broker_driver import driver, nonce_of
from support.processes import eventually
from zagent import __version__
from zagent.errors import ProtocolError
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import Hello

#: Messages. `make chaos` asks for more.
COUNT = int(os.environ.get("ZAGENT_FUZZ", "20000"))
#: No message takes as long, in s: a generous bound for a machine that does other things, too.
TIMEOUT_S = 60 + COUNT // 200


def read(read, data):
    """The value, or None where it was refused; any other error fails the test."""
    try:
        return read(data)
    except ProtocolError:
        return None


@pytest.mark.timeout(TIMEOUT_S)
def test_the_codec_reads_or_refuses_them():
    """Whatever is read as a message is one: it can be written, and is read again as the same."""
    fuzz, understood = Fuzz(1), 0
    for _ in range(COUNT):
        frames = fuzz.message()
        header = read(decode_header, frames[0])
        if header is not None:
            understood += 1
            assert decode_header(encode_header(header)) == header
        body = read(decode_body, frames[1:])
        if body is not None:
            decode_body(encode_body(body))
    assert COUNT // 4 < understood < COUNT


@pytest.mark.timeout(TIMEOUT_S)
def test_the_brokers_core_survives_them():
    """Said by strangers, by a caller and by members with many credits; afterwards honest calls are answered."""
    d = driver()
    members = [d.join(name, 8) for name in ("m0", "m1")]
    caller = d.caller("fuzz")
    lanes = [lane + nonce for nonce in (caller, nonce_of("stranger"), *members) for lane in (b"d", b"c")]
    fuzz = Fuzz(2, caller)
    for number in range(COUNT):
        d.now += 0.001
        d.raw(lanes[number % len(lanes)], fuzz.message())
        if number % 100 == 0:
            d.tick()
            d.hello(caller, Hello("", "", 0, 0, "", __version__))
        d.take()
    honest, member = d.caller("honest"), d.join("m9", epoch=7)
    (sent,) = d.call(honest, b"1", member="m9")
    assert sent.to == b"c" + member
    (answer,) = d.reply(member, b"1", value="served")
    assert (answer.to, answer.body) == (b"d" + honest, "served")


def is_idle(status):
    """Whether nothing waits or runs: the last of the attacker's calls may, for a moment."""
    return not status["pending"] and not any(m["in_flight"] for m in status["pools"]["engine"].values())


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_live_broker_survives_them():
    """Every token beside them is right, every process is the same and idle afterwards, and all was counted."""
    with tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as place, Processes() as processes:
        siege = Siege(processes, str(Path(place)), callers=1)
        before = siege.status()
        rounds = 0
        siege.begin(Attack(3, COUNT))
        while siege.attacking or not rounds:
            siege.round(500)
            rounds += 1
        assert siege.ended(at_once=False).messages == COUNT
        siege.round(500)
        eventually(lambda: is_idle(siege.status()))
        after = siege.status()
    counted = sum(after["counters"].values()) - sum(before["counters"].values())
    assert counted > COUNT // 2
    for name, member in before["pools"]["engine"].items():
        now = after["pools"]["engine"][name]
        assert (now["state"], now["pid"], now["epoch"]) == ("ready", member["pid"], 1)
    assert after["incarnation"] == 1
