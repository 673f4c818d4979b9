"""Simulated engines; see docs/simulated-engine.md."""

from zagent.engine.sim.engine import SimEngine, build

__all__ = ["SimEngine", "build"]
