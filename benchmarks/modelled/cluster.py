"""Modelled callers and engines around a real `BrokerCore`: messages are encoded, routed and decoded as ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.modelled.clock import Clock
from benchmarks.modelled.engine import Job, ModelEngine, Speed
from benchmarks.modelled.work import Trajectory
from zagent import __version__
from zagent.broker.core import BrokerCore, Sends
from zagent.broker.roster import CONTROL, DATA
from zagent.broker.routing import STICKY, Routing
from zagent.wire.codec import decode_header, encode_body, encode_header
from zagent.wire.messages import Call, EndSession, Hello, Reply

_SECRET, _CALLER, _EMPTY = "model", b"caller..", encode_body(None)


class Layout(NamedTuple):
    """A cluster."""

    engines: int
    speed: Speed = Speed()
    routing: Routing = STICKY
    cap: int = 512  #: calls an engine is given at once (`engine.max_in_flight`'s default)
    late: int = 0  #: of the engines, those that come later, as ones that were started again do …
    late_s: float = 0.0  #: … and when
    in_flight: int = 100_000  #: trajectories at once


class Result(NamedTuple):
    """Of one run."""

    makespan_s: float
    prefilled: int  #: prompt tokens that were computed, those of calls that were put back among them
    cached: int  #: … that were found
    preempted: int
    busy: float  #: share of the engines' time until the end, 0 to 1

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens."""
        return self.cached / max(1, self.cached + self.prefilled)


def simulate(layout: Layout, work: Sequence[Trajectory]) -> Result:
    """Run all of ``work``. The same arguments give the same result."""
    return _Cluster(layout, work).run()


class _Cluster:
    def __init__(self, layout: Layout, work: Sequence[Trajectory]) -> None:
        self._layout = layout
        self._clock = Clock()
        self._core = BrokerCore(secret=_SECRET, routing={"engine": layout.routing})
        self._engines: dict[bytes, ModelEngine] = {}  # by their data lanes
        self._calls: dict[bytes, tuple[Trajectory, int]] = {}  # with the turn
        self._todo = deque(work)
        self._left = len(work)
        self._finished = 0.0

    def run(self) -> Result:
        self._hello(_CALLER, Hello("", "caller", 0, 0, "", __version__))
        layout = self._layout
        for number in range(layout.engines):
            at = layout.late_s if number >= layout.engines - layout.late else 0.0
            self._clock.at(at, lambda number=number: self._join(number))  # type: ignore[misc]
        self._clock.at(0.0, self._start)
        self._clock.run()
        if self._left:
            raise RuntimeError(f"{self._left} trajectories never ended")
        engines = self._engines.values()
        return Result(
            self._finished,
            sum(engine.prefilled for engine in engines),
            sum(engine.cached for engine in engines),
            sum(engine.preempted for engine in engines),
            sum(engine.busy_s for engine in engines) / (self._finished * len(engines)),
        )

    def _start(self) -> None:
        for _ in range(min(self._layout.in_flight, len(self._todo))):
            self._turn(self._todo.popleft(), 0)

    def _join(self, number: int) -> None:
        nonce = b"engine%02d" % number
        self._engines[DATA + nonce] = ModelEngine(self._clock, self._layout.speed)
        self._hello(nonce, Hello("engine", f"engine-{number}", 1, self._layout.cap, _SECRET, __version__))

    def _hello(self, nonce: bytes, hello: Hello) -> None:
        for lane in (DATA, CONTROL):
            self._say(lane + nonce, hello, {})

    def _say(self, sender: bytes, message: Any, body: Any = None) -> None:
        frames = [encode_header(message), *(_EMPTY if body is None else encode_body(body))]
        self._deliver(self._core.frames(sender, frames, self._clock.now))

    def _deliver(self, sends: Sends) -> None:
        for to, frames in sends:
            message = decode_header(frames[0])
            if isinstance(message, Call):
                self._given(self._engines[to], to, message)
            elif isinstance(message, Reply):
                self._answered(message.call)

    def _turn(self, one: Trajectory, turn: int) -> None:
        call = _CALLER + (one.number * 1000 + turn).to_bytes(8, "big")
        self._calls[call] = one, turn
        self._say(
            DATA + _CALLER,
            Call(call, 1, "engine", "generate", str(one.number), incarnation=1, group=str(one.group)),
        )

    def _given(self, engine: ModelEngine, lane: bytes, call: Call) -> None:
        one, turn = self._calls[call.call]
        reply = Reply(call.call, call.attempt)
        job = Job(one.keys(turn), one.context(turn), one.turns[turn].answer, lambda: self._say(lane, reply))
        engine.submit(job)

    def _answered(self, call: bytes) -> None:
        one, turn = self._calls.pop(call)
        if turn + 1 < len(one.turns):
            later = self._clock.now + one.turns[turn + 1].wait_s
            self._clock.at(later, lambda: self._turn(one, turn + 1))
            return
        self._say(DATA + _CALLER, EndSession("engine", str(one.number)))
        self._left -= 1
        self._finished = self._clock.now
        if self._todo:
            self._turn(self._todo.popleft(), 0)
