"""The hostile messages are of every sort, and their price is told as it was measured."""

from __future__ import annotations

from itertools import islice

from benchmarks.attacker import PEERS, PREPARED, Attack, _messages
from benchmarks.fuzz import Fuzz
from benchmarks.hostile import report
from benchmarks.relay.cluster import Measured
from zagent.errors import ProtocolError, VersionMismatch
from zagent.wire.codec import decode_body, decode_header
from zagent.wire.messages import KINDS


def sort_of(frames):
    try:
        return type(decode_header(frames[0])).__name__
    except VersionMismatch:
        return "another version"
    except ProtocolError:
        return "malformed"


def test_there_is_everything_among_them():
    """Every kind of message, messages that are none, bodies that can and cannot be read; but no `drain` or `remove`, to
    which whoever is let in has a right."""
    fuzz = Fuzz(1)
    made = [fuzz.message() for _ in range(3000)]
    sorts = [sort_of(frames) for frames in made]
    assert set(sorts) == {kind.__name__ for kind in KINDS.values()} | {"another version", "malformed"}
    assert all(1 <= len(frames) <= 5000 for frames in made)
    assert any(len(frames) > 4096 for frames in made)
    readable = 0
    for frames in made:
        try:
            decode_body(frames[1:])
            readable += 1
        except ProtocolError:
            pass
    assert 300 < readable < 2700
    assert not any(b"remove" in frame or b"drain" in frame for frames in made for frame in frames)


def test_a_seed_makes_the_same_again():
    """Whatever it broke can be broken again; another seed breaks something else."""
    first, again, other = (
        [fuzz.message() for _ in range(300)]
        for fuzz in (Fuzz(7, b"12345678"), Fuzz(7, b"12345678"), Fuzz(8, b"12345678"))
    )
    assert first == again
    assert first != other


class Silent:
    """A peer without a connection."""

    def __init__(self, number):
        self.nonce = bytes([number]) * 8


def test_at_a_rate_the_messages_are_made_beforehand():
    """Making them is not what is measured; they come from all peers, and again and again."""
    peers = [Silent(number) for number in range(PEERS)]
    made = list(islice(_messages(Attack(0, PREPARED + 5, rate=10), peers), PREPARED + 5))
    assert made[PREPARED:] == made[:5]
    assert {peer for peer, _ in made} == set(peers)
    assert len(list(_messages(Attack(0, 20), peers))) == 20


def test_the_report_has_medians_and_ratios():
    """Ratios pair by pair, so that a slow minute of the machine does not count twice."""
    pairs = [
        {"quiet": Measured(quiet, 1.0, 2.0, 3.0), "hostile": Measured(hostile, 2.0, 4.0, 6.0)}
        for quiet, hostile in ((1000.0, 900.0), (500.0, 400.0), (2000.0, 1900.0))
    ]
    assert report(pairs, 77) == (
        "quiet: 1,000 calls/s, p50 1.0 ms, p99 2.0 ms, CPU 3 µs a call\n"
        "hostile: 900 calls/s, p50 2.0 ms, p99 4.0 ms, CPU 6 µs a call\n"
        "ratio beside 77 hostile messages/s: 0.90 (0.80–0.95, 3 pairs)"
    )
