"""The one runner: every benchmark, each of its peers in turn, on this machine, in one session.

    python -m benchmarks.run [--only NAME …] [--peers A,B] [--quick] [--repeats N] [--trace FILE] [--out DIR]

Writes a CSV file per benchmark as its figures come, report.json, report.md and the plots, and prints the tables. The
exit status is 1 if a benchmark failed; the others run all the same.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, cast

from benchmarks import report
from benchmarks.report import Measured
from benchmarks.report_facts import facts
from benchmarks.suite import Benchmark, Options, missing

#: By name, in the order they run. Only those that run are imported; one that cannot be is reported like one that fails.
BENCHMARKS: Mapping[str, str] = {
    "relay": "benchmarks.relay.suite",
    "rollout": "benchmarks.rollout.suite",
    "collate": "benchmarks.collate",
    "start": "benchmarks.start",
    "policies": "benchmarks.policies",
    "scale": "benchmarks.scale.suite",
    "trainers": "benchmarks.trainers.suite",
    "sglang": "benchmarks.sglang_cost",
}
OURS = "zagent"


@dataclass
class Selection:
    """Benchmarks by name, each with the peers that run; what was left out, and why."""

    modules: dict[str, Benchmark] = field(default_factory=dict)
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  #: name -> traceback of its import


class Unusable(Exception):
    """Peers were asked for that there are not, or that are not installed."""


def select(
    names: Sequence[str],
    asked: Sequence[str] | None,
    load: Callable[[str], Benchmark],
    why_not: Callable[[str], str | None] = missing,
) -> Selection:
    """The benchmarks ``names`` with the peers ``asked`` for (None: all that are installed). zagent always runs: the
    others are compared with it. Raises `Unusable`."""
    found = Selection()
    for name in names:
        try:
            found.modules[name] = load(name)
        except Exception:
            found.broken[name] = traceback.format_exc()
    known = dict.fromkeys(peer for module in found.modules.values() for peer in module.PEERS)
    reasons = {peer: reason for peer in known if (reason := why_not(peer)) is not None}
    for peer in asked or ():
        if peer not in known:
            raise Unusable(f"no peer {peer!r} here; there are {', '.join(known)}")
        if peer in reasons:
            raise Unusable(f"peer {peer}: {reasons[peer]}")
    if asked is None:
        found.left_out = reasons
    wanted = set(known) - set(reasons) if asked is None else {OURS, *asked}
    for name, module in found.modules.items():
        found.peers[name] = tuple(peer for peer in module.PEERS if peer in wanted)
    return found


def load(name: str) -> Benchmark:
    """The module of a benchmark. Raises whatever its import raises."""
    return cast(Benchmark, importlib.import_module(BENCHMARKS[name]))


def measure(name: str, benchmark: Benchmark, options: Options, command: str) -> Measured:
    """Run one benchmark; an error of any kind is part of the result, as are the figures taken before it."""
    began = time.monotonic()
    with report.Table(options.out, name) as taken:
        figures = taken.figures
        try:
            benchmark.run(options, taken.record)
            table = benchmark.table(figures)
            plots = benchmark.plots(figures, options.out) if report.can_plot() else []
        except Exception:
            error = traceback.format_exc()
            return Measured(name, command, time.monotonic() - began, tuple(figures), error=error)
    return Measured(name, command, time.monotonic() - began, tuple(figures), table, tuple(p.name for p in plots))


def _terminated(signum: int, frame: object) -> NoReturn:
    """SIGTERM, made an exception as Ctrl-C is, so that every context manager ends its processes."""
    sys.exit(128 + signum)


def command_of(name: str, options: argparse.Namespace) -> str:
    """What measures this benchmark alone, in the same way."""
    words = ["python", "-m", "benchmarks.run", "--only", name]
    words += ["--peers", ",".join(options.peers)] if options.peers is not None else []
    words += ["--quick"] if options.quick else []
    words += ["--repeats", str(options.repeats)] if options.repeats is not None else []
    words += ["--trace", str(options.trace)] if options.trace is not None else []
    return shlex.join(words)


def _peers(text: str) -> list[str]:
    return [peer.strip() for peer in text.split(",") if peer.strip()]


def _repeats(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _file(text: str) -> Path:
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"no file {text}")
    return path


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--peers", type=_peers, metavar="A,B", help="these beside zagent (all that are installed)")
    parser.add_argument("--quick", action="store_true", help="a tenth: does it run, not how fast")
    parser.add_argument("--repeats", type=_repeats, metavar="N", help="pairs of each case (each benchmark's own)")
    parser.add_argument("--trace", type=_file, metavar="FILE", help="JSONL trace to replay (rollout)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), metavar="DIR", help="(outputs/bench)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write and print; the exit status."""
    options = arguments(argv)
    try:
        chosen = select(options.only or list(BENCHMARKS), options.peers, load)
    except Unusable as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    for peer, reason in chosen.left_out.items():
        print(f"left out: {peer} ({reason})", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    results = [Measured(name, command_of(name, options), 0.0, (), error=why) for name, why in chosen.broken.items()]
    for result in results:
        print(f"{result.name}: cannot be imported", file=sys.stderr)
    about = facts(shlex.join(["python", "-m", "benchmarks.run", *(sys.argv[1:] if argv is None else argv)]))
    for name, benchmark in chosen.modules.items():
        print(f"{name}: {', '.join(chosen.peers[name])}", file=sys.stderr)
        how = Options(options.quick, options.repeats, chosen.peers[name], options.trace, options.out)
        results.append(measure(name, benchmark, how, command_of(name, options)))
        print(f"{name}: {'FAILED' if results[-1].error else 'done'}, {results[-1].seconds:.0f} s", file=sys.stderr)
        report.write(options.out, about, results, chosen.left_out)  # each time: a later one may be interrupted
    report.write(options.out, about, results, chosen.left_out)
    print(report.text(about, results, chosen.left_out))
    print(f"written to {options.out}", file=sys.stderr)
    return int(any(result.error for result in results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
