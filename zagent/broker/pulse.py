"""What everybody hears of the broker from time to time."""

from __future__ import annotations

from zagent.broker.held import Held
from zagent.broker.leases import Send
from zagent.broker.roster import Roster
from zagent.wire.codec import encode_header
from zagent.wire.messages import Passed, Pulse

#: Seconds between two pulses to every peer.
PULSE_S = 1.0


class Pulses:
    """Signs of life to all, and to members how far their answers have come.

    Args:
        now: when the broker starts, s.
    """

    def __init__(self, roster: Roster, held: Held, send: Send, *, incarnation: int, now: float) -> None:
        self._roster, self._held, self._send = roster, held, send
        self._pulse = [encode_header(Pulse(incarnation))]
        self._next = now + PULSE_S

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now < self._next:
            return
        self._next = now + PULSE_S
        for caller in self._roster.callers.values():
            self._send(caller.control, self._pulse)
        self._settle()

    def _settle(self) -> None:
        """Members need not keep the answers that had been passed on by the pulse before: in a second they have left
        this process. What callers may still come for is older."""
        holding = set(self._held.values())
        for caller in self._roster.callers.values():
            member = caller.member
            if member is None or member in holding:
                continue
            if member.settled > member.told:
                member.told = member.settled
                self._send(member.data, [encode_header(Passed(member.settled))])
            member.settled = member.answered
