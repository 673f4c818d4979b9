"""Which loads are measured, on which peers, and with how many calls."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.relay.cluster import Peer
from benchmarks.relay.traffic import SERVERS, Case, Load

#: Each peer's module.
MODULES = {
    "zagent": "benchmarks.relay.peers.zagent",
    "sockets": "benchmarks.relay.peers.sockets",
    "http": "benchmarks.relay.peers.http",
    "http-orjson": "benchmarks.relay.peers.http_orjson",
    "sglang-router": "benchmarks.relay.peers.sglang_router",
    "ray-local": "benchmarks.relay.peers.ray_local",
    "ray-global": "benchmarks.relay.peers.ray_global",
}
#: Up at the same time, so that the rounds of a pair follow each other at once. Ray is up alone: its own processes are
#: never quite idle.
TOGETHER = ("zagent", "sockets", "http", "http-orjson", "sglang-router")
#: Of the sweeps.
SWEPT = ("zagent", "sockets")

SIZES = ((1024, 128), (8192, 1024))
CASES = tuple(Case(*size, as_lists) for size in SIZES for as_lists in (False, True))
BASE = CASES[0]
SWEEPS: dict[str, tuple[Load, ...]] = {
    "calls in flight per caller": tuple(Load(BASE, in_flight=number) for number in (1, 8, 64, 256)),
    "prompt tokens": tuple(Load(Case(tokens, 128, False)) for tokens in (128, 1024, 8192, 32768)),
    "callers": tuple(Load(BASE, callers=number) for number in (1, 2, 4)),
    "servers": tuple(Load(BASE, servers=number) for number in (1, 2, 4)),
}
MAIN = tuple(load for case in CASES for load in (Load(case), Load(case, callers=1, in_flight=1)))

REPEATS, SWEEP_REPEATS = 5, 3
#: Calls of one caller: enough for percentiles, and for a `quick` run.
FEWEST, FEWEST_QUICK = 100, 10
#: Calls of one caller that has one in flight: 0.2 ms each on sockets.
SINGLE = 1000


@dataclass(frozen=True)
class Stage:
    """Peers whose clusters are up together, and the loads that they get in turn: of sweeps, only some of them."""

    servers: int
    loads: tuple[Load, ...]
    peers: tuple[str, ...]

    def loads_of(self, peer: str) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if load in MAIN or peer in SWEPT)


def peer(name: str) -> Peer:
    """Its module; imports what the peer needs."""
    return cast(Peer, importlib.import_module(MODULES[name]))


def stages(peers: Sequence[str], *, sweeps: bool) -> Iterator[Stage]:
    """One repeat, in order. A sweep's point that is in the main table, too, is measured once."""
    swept = tuple(name for name in SWEPT if name in peers)
    loads = [load for sweep in SWEEPS.values() for load in sweep if load not in MAIN] if sweeps and swept else []
    together = tuple(name for name in TOGETHER if name in peers)
    if together:
        yield Stage(SERVERS, MAIN + _distinct(loads, SERVERS), together)
    for name in peers:
        if name not in TOGETHER:
            yield Stage(SERVERS, MAIN, (name,))
    for servers in sorted({load.servers for load in loads} - {SERVERS}):
        yield Stage(servers, _distinct(loads, servers), swept)


def _distinct(loads: Sequence[Load], servers: int) -> tuple[Load, ...]:
    return tuple(dict.fromkeys(load for load in loads if load.servers == servers))


def calls(load: Load, pace: float, *, quick: bool) -> int:
    """Of each caller: about half a second's on two cores, for a peer of that ``pace``."""
    case = load.case
    cost_us = 80 + case.prompt / 100 + (case.prompt + case.response) / 8 * case.as_lists
    number = 1e6 / cost_us / load.callers
    if load.in_flight * load.callers < 8:
        number = min(number, SINGLE)
    return int(max(FEWEST_QUICK, number * pace / 10) if quick else max(FEWEST, number * pace))
