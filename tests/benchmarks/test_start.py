"""The start benchmark starts a real cluster, and shows its figures beside Ray's."""

from __future__ import annotations

import asyncio
import os
import uuid
from multiprocessing import resource_tracker
from typing import Any

import pytest

from benchmarks import start
from benchmarks.procfs import of_run
from benchmarks.start_plan import ENGINES, Started
from benchmarks.start_ray import Server, Worker
from benchmarks.suite import Figure, Options


def test_a_cluster_starts_answers_and_is_gone(monkeypatch):
    """Times in their order, memory of every room; no process is left."""
    resource_tracker.ensure_running()  # this process's own, without the run's id
    run_id = uuid.uuid4().hex
    monkeypatch.setitem(os.environ, "ZAGENT_RUN_ID", run_id)
    found = start.started("zagent")
    times = found.times
    assert 0 < times["ready"] < times["first_generate"] < times["first_row"]
    assert times["cpu"] > 0
    for room in ("worker", "engine", "broker", "launcher"):
        assert found.memory[f"{room}_rss"] >= found.memory[f"{room}_pss"] > 1
    assert found.memory["total_pss"] > 4 * found.memory["worker_pss"]
    assert of_run(run_id) == {}


class Method:
    """`actor.generate`, as a handle of Ray's has it."""

    def __init__(self, asked: list[str], server: int) -> None:
        self._asked, self._server = asked, server

    def remote(self, prompt: list[int], params: dict[str, Any], request: str) -> Any:
        self._asked.append(f"{request} on {self._server}")
        return Server().generate(prompt, params, request)


class Handle:
    def __init__(self, asked: list[str], server: int) -> None:
        self.generate = Method(asked, server)


def test_rays_workers_ask_all_servers():
    """Rows are spread over them; each is one call, answered with 8 tokens."""
    asked: list[str] = []
    worker = Worker([Handle(asked, server) for server in range(ENGINES)])
    answers = [asyncio.run(worker.run(row)) for row in range(2)]
    assert [len(answer) for answer in answers] == [8, 8]
    assert asked == ["0 on 0", "1 on 1"]


def figures() -> list[Figure]:
    made: list[Figure] = []
    numbers = {
        "zagent": Started({"first_row": 2.0}, {"broker_pss": 24.0, "total_pss": 300.0}),
        "ray": Started({"first_row": 5.0}, {"rest_pss": 370.0, "total_pss": 900.0}),
    }
    for peer, found in numbers.items():
        made += [Figure("start", start.CASE, peer, 0, f"{name}_s", value, "s") for name, value in found.times.items()]
        made += [Figure("start", start.CASE, peer, 0, f"{name}_mb", v, "MB") for name, v in found.memory.items()]
    return made


def test_the_table_compares_what_both_have():
    """What only one of them has stands alone; what nobody measured has no line."""
    lines = start.table(figures()).splitlines()
    assert "| first row | 2.00 (2.00–2.00) | 5.00 (5.00–5.00) | 2.5 (2.5–2.5) |" in lines
    assert "| broker, its share | 24 (24–24) | – | – |" in lines
    assert "| all together | 300 (300–300) | 900 (900–900) | 3.0 (3.0–3.0) |" in lines
    assert not any(line.startswith("| import") for line in lines)


def test_repeats_alternate_their_order(monkeypatch, tmp_path):
    """So that neither always runs on the machine that the other left."""
    order: list[str] = []

    def fake(peer: str) -> Started:
        order.append(peer)
        return Started({"ready": 1.0}, {"total_pss": 2.0})

    monkeypatch.setattr(start, "started", fake)
    found: list[Figure] = []
    start.run(Options(False, 2, start.PEERS, None, tmp_path), found.append)
    assert order == ["zagent", "ray", "ray", "zagent"]
    assert found[:2] == [
        Figure("start", start.CASE, "zagent", 0, "ready_s", 1.0, "s"),
        Figure("start", start.CASE, "zagent", 0, "total_pss_mb", 2.0, "MB"),
    ]


def test_plots_are_pictures(tmp_path):
    """One of times and one of memory."""
    pytest.importorskip("matplotlib", reason="drawn only with the bench extra")
    for file in start.plots(figures(), tmp_path):
        assert file.read_bytes().startswith(b"\x89PNG")
