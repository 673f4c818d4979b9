"""What zagent costs on real SGLang, and what sticky routing saves there: the built-in tiny model, on a GPU or a CPU.

* overhead: one engine; calls through `generate` and the broker, against the same calls made in the engine's own process
  with nothing in between. In pairs, at 1, 8 and 32 in flight, every prompt a new one.
* conversations: two engines; conversations of several turns, every turn's prompt all that was said before. zagent's
  sticky sessions, against the fewest requests in flight without sessions, against an engine drawn at random.

Each engine takes about 3 GB of memory and 20 s to start.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing import colour, drawing
from benchmarks.processes import Processes
from benchmarks.sglang_conversations import Conversations, Talk, Talked
from benchmarks.sglang_overhead import Overhead, Round, Timed
from benchmarks.suite import Figure, Options, Record, markdown, median, peers, ratios, spread, values

NAME = "sglang"
#: The first two are a pair of the overhead, the first, third and fourth one of the conversations.
PEERS = ("zagent", "in-process", "least", "random")
REPEATS = 5
#: Calls in flight -> calls of one round: one to three seconds on two cores.
CALLS = {1: 8, 8: 32, 32: 96}
TALK = Talk(conversations=16, at_once=8, turns=5, opening=512, answer=24, reply=96)
OVERHEAD, TALKING = "in flight", "conversations"


def run(options: Options, record: Record) -> None:
    """Raises `Failed` or `StartupError` where SGLang does not start, and where an answer was wrong."""
    repeats = options.repeats or (1 if options.quick else REPEATS)
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        if "in-process" in options.peers:
            with Processes() as processes, Overhead(processes, directory) as overhead:
                asyncio.run(_overhead(overhead, repeats, options, record))
        routed = [peer for peer in options.peers if peer != "in-process"]
        if len(routed) > 1:
            with Conversations(Path(directory)) as conversations:
                _conversations(conversations, routed, repeats, options, record)


async def _overhead(overhead: Overhead, repeats: int, options: Options, record: Record) -> None:
    seeds = iter(range(1, 1_000_000))
    async with overhead.connected():
        for repeat in range(-1, repeats):  # the first warms both ways up
            for in_flight, calls in CALLS.items():
                pair = ("in-process", "zagent") if repeat % 2 else ("zagent", "in-process")
                for peer in pair:
                    round_ = Round(max(in_flight, calls // (4 if options.quick else 1)), in_flight, next(seeds))
                    timed = await overhead.timed(peer, round_)
                    if repeat >= 0:
                        _record_round(record, f"{OVERHEAD}: {in_flight}", peer, repeat, timed)


def _record_round(record: Record, case: str, peer: str, repeat: int, timed: Timed) -> None:
    record(Figure(NAME, case, peer, repeat, "tokens_per_s", timed.tokens_per_s, "1/s"))
    record(Figure(NAME, case, peer, repeat, "p50_ms", timed.p50_ms, "ms"))


def _conversations(
    conversations: Conversations, routed: Sequence[str], repeats: int, options: Options, record: Record
) -> None:
    talk = Talk(4, 4, 3, 256, 8, 64) if options.quick else TALK
    for repeat in range(-1, repeats):
        first = repeat % len(routed)
        for peer in (*routed[first:], *routed[:first]):
            talked: Talked = conversations.hold(peer, talk, seed=repeat + 2)
            if repeat >= 0:
                record(Figure(NAME, TALKING, peer, repeat, "makespan_s", talked.seconds, "s"))
                record(Figure(NAME, TALKING, peer, repeat, "cached_share", talked.cached_share, ""))


def table(figures: Sequence[Figure]) -> str:
    """Markdown; medians, and ratios pair by pair. Without the part that was not measured."""
    talked = [figure for figure in figures if figure.case == TALKING]
    asked = [figure for figure in figures if figure.case != TALKING]
    return "\n\n".join([*([_overhead_table(asked)] if asked else []), *([_talking_table(talked)] if talked else [])])


def _overhead_table(figures: Sequence[Figure]) -> str:
    head = ["overhead", "tokens/s zagent", "in process", "ratio", "p50 ms zagent", "in process", "ratio"]
    rows = []
    for in_flight in CALLS:
        case, cells = f"{OVERHEAD}: {in_flight}", []
        for name in ("tokens_per_s", "p50_ms"):
            cells += [f"{median(figures, case=case, peer=peer, name=name):,.0f}" for peer in PEERS[:2]]
            cells.append(spread(ratios(figures, case=case, name=name, under=PEERS[1])))
        rows.append([f"{in_flight} in flight", *cells])
    return markdown(head, rows)


def _talking_table(figures: Sequence[Figure]) -> str:
    head = ["conversations", "makespan s", "over sticky", "prompt tokens cached"]
    rows = []
    for peer in peers(figures):
        found = {name: list(values(figures, case=TALKING, peer=peer, name=name).values()) for name in _TOLD}
        longer = ratios(figures, case=TALKING, name="makespan_s", over=peer, under=PEERS[0])
        cells = [spread(found["makespan_s"], ".1f"), spread(longer), spread(found["cached_share"])]
        rows.append([_SHOWN[peer], *cells])
    return markdown(head, rows)


_TOLD = ("makespan_s", "cached_share")
_SHOWN = {"zagent": "sticky (zagent)", "least": "fewest in flight", "random": "random"}


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """PNG files: tokens per second each way, where that was measured."""
    if all(figure.case == TALKING for figure in figures):
        return []
    file = directory / "sglang-overhead.png"
    with drawing(file, title="SGLang, tiny model", xlabel="calls in flight", ylabel="tokens/s") as axes:
        for peer in PEERS[:2]:
            speed = [median(figures, case=f"{OVERHEAD}: {n}", peer=peer, name="tokens_per_s") for n in CALLS]
            axes.plot(list(CALLS), speed, marker="o", color=colour(peer), label=peer)
        axes.set(xscale="log", ylim=(0, None))
        axes.legend()
    return [file]
