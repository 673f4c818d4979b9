"""What hostile messages cost the traffic beside them: calls per second on simulated engines without latency, with and
without a process that sends the broker a thousand such messages a second, in pairs in one run.

    python -m benchmarks.hostile [--rate N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attacker import Attack, Attacked
from benchmarks.machine import machine
from benchmarks.processes import Failed, Processes
from benchmarks.relay.cluster import Cluster, Measured, Shape
from benchmarks.relay.marked import Mark
from benchmarks.relay.peers import zagent
from benchmarks.relay.traffic import Case, Load
from zagent.client.calls import Calls
from zagent.client.link import Link
from zagent.wire.messages import BROKER
from zagent.wire.sockets import DealerChannel

CASE = Case(1024, 128, as_lists=False)
ENGINES = 2
CALLERS = 2
IN_FLIGHT = 64
#: Calls of a caller in one round: some two seconds on two cores.
CALLS = 8000


class Siege:
    """A broker, engines, callers whose every token is checked, and an attacker. All but the callers' processes are the
    same from the first to the last."""

    def __init__(self, processes: Processes, directory: str, callers: int = CALLERS) -> None:
        mark = Mark()
        with mark.on():
            self.endpoint = zagent.start_servers(processes, Shape(directory, ENGINES))
            self._cluster = Cluster(zagent.callers(processes, callers, self.endpoint), mark)
        self._load = Load(CASE, callers, IN_FLIGHT, ENGINES)
        self._attacker = processes.start("attacker", "benchmarks.attacker:main", {"endpoint": self.endpoint})

    def begin(self, attack: Attack) -> None:
        """From now on the attacker sends."""
        self._attacker.send(attack)
        self._attacker.receive()
        self._attacker.send("go")

    def ended(self, *, at_once: bool) -> Attacked:
        """Wait until it has sent all, or stop it."""
        if at_once:
            self._attacker.send("stop")
        done: Attacked = self._attacker.receive()
        return done

    @property
    def attacking(self) -> bool:
        """Whether it still sends."""
        return not self._attacker.has_spoken()

    def round(self, calls: int = CALLS) -> Measured:
        """``calls`` of each caller. Raises `Failed` where a token of a reply is wrong."""
        return self._cluster.round(self._load, calls)

    def status(self) -> dict[str, Any]:
        """The broker's own. Raises `ConnectionLost` if it does not answer."""
        return asyncio.run(_status(self.endpoint))


async def _status(endpoint: str) -> dict[str, Any]:
    link = Link(partial(DealerChannel, endpoint))
    calls = Calls(link)
    await link.open()
    try:
        found: dict[str, Any] = await calls.call(BROKER, "status", timeout=30)
        return found
    finally:
        link.close()


def pair(siege: Siege, number: int, rate: int) -> dict[str, Measured]:
    """One round each way, one after the other, in turns."""
    done: dict[str, Measured] = {}
    for way in ("quiet", "hostile") if number % 2 == 0 else ("hostile", "quiet"):
        if way == "hostile":
            siege.begin(Attack(number, 10**9, rate))
        done[way] = siege.round()
        if way == "hostile":
            said = siege.ended(at_once=True)
            print(f"{said.messages / said.seconds:.0f} hostile messages/s", file=sys.stderr)
    return done


def report(pairs: list[dict[str, Measured]], rate: int) -> str:
    """Medians over the pairs, and the ratio pair by pair."""
    ratios = [one["hostile"].calls_per_s / one["quiet"].calls_per_s for one in pairs]

    def median(way: str, name: str) -> float:
        return float(statistics.median(getattr(one[way], name) for one in pairs))

    lines = [
        f"{way}: {median(way, 'calls_per_s'):,.0f} calls/s, p50 {median(way, 'p50_ms'):.1f} ms, "
        f"p99 {median(way, 'p99_ms'):.1f} ms, CPU {median(way, 'cpu_us'):.0f} µs a call"
        for way in ("quiet", "hostile")
    ]
    return "\n".join(
        [*lines, f"ratio beside {rate} hostile messages/s: {statistics.median(ratios):.2f} "
         f"({min(ratios):.2f}–{max(ratios):.2f}, {len(ratios)} pairs)"]
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.partition(":")[0])
    parser.add_argument("--rate", type=int, default=1000, metavar="N", help="hostile messages a second (1000)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="pairs (7)")
    parser.add_argument("--json", metavar="FILE", help="also write every round's figures there")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="hostile-") as directory, Processes() as processes:
            siege = Siege(processes, directory)
            siege.round()
            pairs = [pair(siege, number, options.rate) for number in range(options.repeats)]
            counters = siege.status()["counters"]
    except Failed as error:
        sys.exit(f"hostile: {error}")
    print(report(pairs, options.rate))
    print(f"the broker counted {', '.join(f'{count} {name}' for name, count in counters.items() if count)}")
    command = shlex.join(["python", "-m", "benchmarks.hostile", *(sys.argv[1:] if argv is None else argv)])
    print(f"{CALLERS} callers x {IN_FLIGHT} in flight, {ENGINES} engines. {machine()}. `{command}`")
    if options.json:
        rows = [{way: asdict(one) for way, one in found.items()} for found in pairs]
        Path(options.json).write_text(json.dumps({"rate": options.rate, "pairs": rows, "counters": counters}, indent=1))


if __name__ == "__main__":
    main()
