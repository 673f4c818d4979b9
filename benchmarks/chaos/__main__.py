"""Rollouts whose engines, workers and broker are killed, stopped and slowed all the time: each row ends once, `ok`, and
token for token as in a quiet run."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos import checks
from benchmarks.chaos.losses import Recovery, recoveries
from benchmarks.chaos.run import STALL_S, Plan, Run, run
from benchmarks.chaos.script import ALL_KINDS, KINDS
from benchmarks.machine import machine

#: Kills of each kind with work in flight that a run must have had.
KILLS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status: 1 if anything was lost, changed or left."""
    options = _arguments(argv)
    plan = Plan(
        rows=options.rows,
        engines=options.engines,
        workers=options.workers,
        every_s=options.every,
        for_s=options.wreck_for,
        kinds=options.kinds,
        overrides=tuple(options.set),
    )
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    report: list[dict[str, Any]] = []
    quiet = run(plan, directory / "quiet")
    wrong = quiet_faults(quiet, plan)
    tell("quiet", quiet, wrong)
    broken = bool(wrong)
    losses = []
    for seed in range(options.seed, options.seed + options.seeds):
        wild = run(plan, directory / f"seed-{seed}", seed)
        wrong = faults(wild, quiet, plan, options.kills)
        tell(f"seed {seed}", wild, wrong)
        report.append(described(seed, wild, wrong))
        losses += wild.losses.all
        if options.verbose:
            print("\n".join(wild.events), flush=True)
        if wrong:
            (directory / f"seed-{seed}" / "events").write_text("\n".join([*wrong, *wild.events]))
            print(
                f"  replay: {command_of(options, seed)}\n  events, logs, ledger: {directory / f'seed-{seed}'}",
                flush=True,
            )
            broken = True
        else:
            shutil.rmtree(directory / f"seed-{seed}")
    print(f"\n{table(recoveries(losses))}\n\n{machine()}. `{command_of(options)}`")
    if options.json:
        summary = {"machine": machine(), "command": command_of(options), "plan": asdict(plan), "runs": report}
        Path(options.json).write_text(json.dumps(summary, indent=1))
    if not broken:
        shutil.rmtree(directory)
    return int(broken)


def quiet_faults(quiet: Run, plan: Plan) -> list[str]:
    """What is wrong with the run in which nothing happens."""
    return [
        *quiet.broken,
        *checks.outcome_faults(quiet.outcomes, plan.rows),
        *checks.ledger_faults(quiet.ledger, quiet.outcomes),
        *checks.attempt_faults(quiet.ledger, quiet.outcomes),
    ]


def faults(wild: Run, quiet: Run, plan: Plan, least_kills: int) -> list[str]:
    """What is wrong with a run in which something did."""
    return [
        *wild.broken,
        *checks.outcome_faults(wild.outcomes, plan.rows),
        *checks.token_faults(wild.outcomes, quiet.outcomes),
        *checks.ledger_faults(wild.ledger, wild.outcomes, wild.stops, wild.ended),
        *checks.digest_faults(wild.ledger, quiet.ledger),
        *checks.kill_faults(wild.losses.counted(), plan.kinds, least_kills),
    ]


def tell(name: str, done: Run, wrong: Sequence[str]) -> None:
    """A line about a run, and what is wrong with it."""
    attempts = sum(outcome.attempt > 1 for outcome in done.outcomes)
    kills = ", ".join(f"{count} {room}" for room, count in done.losses.counted().items())
    ok = sum(outcome.status == "ok" for outcome in done.outcomes)
    print(
        f"{name}: {ok} ok of {len(done.outcomes)} outcomes in {done.seconds:.1f} s, {attempts} rows ran again, "
        f"{len(done.ledger)} tool calls; kills with work in flight: {kills}; {'WRONG' if wrong else 'nothing lost'}",
        flush=True,
    )
    if done.stalled_at is not None:
        print(f"  at outcome {done.stalled_at} no other came for {STALL_S:g} s: the rest was left in peace", flush=True)
    for text in wrong:
        print(f"  {text}", flush=True)


def described(seed: int, wild: Run, wrong: Sequence[str]) -> dict[str, Any]:
    """A run as plain data."""
    return {
        "seed": seed,
        "seconds": wild.seconds,
        "violations": list(wrong),
        "events": wild.events,
        "attempts": [outcome.attempt for outcome in wild.outcomes],
        "tool_calls": len(wild.ledger),
        "losses": [asdict(loss) for loss in wild.losses.all],
        "counters": wild.status.get("counters", {}),
    }


def table(found: Sequence[Recovery]) -> str:
    """Markdown: seconds from the kill on, median and worst."""
    lines = [
        "| killed | kills | with work in flight | known after (worst) | back after (worst) |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.room} | {r.kills} | {r.counted} | {_seconds(r.known)} | {_seconds(r.back)} |" for r in found]
    return "\n".join(lines)


def _seconds(pair: tuple[float, float] | None) -> str:
    return "never" if pair is None else f"{pair[0]:.2f} s ({pair[1]:.2f} s)"


def command_of(options: argparse.Namespace, seed: int | None = None) -> str:
    """The command that runs this again, or only ``seed`` of it."""
    words = ["python", "-m", "benchmarks.chaos", "--seed", str(options.seed if seed is None else seed)]
    words += ["--seeds", str(options.seeds)] if seed is None else []
    words += ["--rows", str(options.rows), "--every", f"{options.every:g}", "--kinds", ",".join(options.kinds)]
    words += ["--for", f"{options.wreck_for:g}"] if options.wreck_for < Plan.for_s else []
    words += ["--engines", str(options.engines), "--workers", str(options.workers)]
    return shlex.join(words + [word for entry in options.set for word in ("--set", entry)])


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if odd := set(kinds) - set(ALL_KINDS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(odd))}; known: {', '.join(ALL_KINDS)}")
    return kinds


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=" ".join(__doc__.split()))
    add = parser.add_argument
    add("--seed", type=int, default=0, help="decides what is done to whom, and when (0)")
    add("--seeds", type=int, default=1, metavar="K", help="this many, from --seed on (1)")
    add("--rows", type=int, default=plan.rows, help=f"trajectories ({plan.rows})")
    add("--engines", type=int, default=plan.engines, help=f"({plan.engines})")
    add("--workers", type=int, default=plan.workers, help=f"({plan.workers})")
    add("--every", type=float, default=plan.every_s, metavar="S", help=f"seconds from kill to kill ({plan.every_s:g})")
    add("--for", dest="wreck_for", type=float, default=plan.for_s, metavar="S", help="seconds of that (the whole run)")
    add(
        "--kinds",
        type=_kinds,
        default=KINDS,
        metavar="A,B",
        help=f"what is done, of {','.join(ALL_KINDS)} (all but the last)",
    )
    add("--kills", type=int, default=KILLS, metavar="N", help=f"least kills of each kind with work in flight ({KILLS})")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of the configuration")
    add("--json", metavar="FILE", help="also write everything that happened there")
    add("--verbose", action="store_true", help="print what was done to whom, also where nothing is wrong")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
