"""As `http`, with orjson instead of Python's json on both sides."""

from __future__ import annotations

from benchmarks.processes import Processes
from benchmarks.relay.cluster import CallerProcesses, Shape
from benchmarks.relay.peers import http

FORMS = http.FORMS
PACE = 1.0


def start(processes: Processes, shape: Shape) -> CallerProcesses:
    """Servers and callers."""
    return http.start(processes, shape, json="orjson")
