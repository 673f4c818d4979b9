"""The short form of `python -m benchmarks.chaos`: kills of each kind under load, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import faults, quiet_faults, table
from benchmarks.chaos.losses import recoveries
from benchmarks.chaos.run import Plan, run

PLAN = Plan(rows=60, engines=2, workers=2, every_s=1.0, for_s=6.5, overrides=("engine.sim.decode_tokens_per_s=90",))


@pytest.mark.timeout(150)
def test_nothing_is_lost(tmp_path: Path) -> None:
    """Engines, workers and the broker are killed, stopped and slowed: each row ends once, `ok`, as in a quiet run;
    nothing is left."""
    quiet = run(PLAN, tmp_path / "quiet")
    assert quiet_faults(quiet, PLAN) == []
    wild = run(PLAN, tmp_path / "wild", seed=1)
    print(f"quiet {quiet.seconds:.1f} s, wild {wild.seconds:.1f} s", *wild.events, sep="\n")
    print(table(recoveries(wild.losses.all)))
    assert faults(wild, quiet, PLAN, least_kills=1) == []
