"""Each peer for real, at its smallest: processes start, every reply is right, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from benchmarks.processes import Failed
from benchmarks.relay import cluster, suite
from benchmarks.relay.cluster import Shape, running
from benchmarks.relay.marked import Mark
from benchmarks.relay.plan import peer
from benchmarks.relay.traffic import Case, Load
from benchmarks.suite import missing
from support.processes import eventually, with_run_id

ROOT = Path(__file__).parents[2]


@pytest.fixture
def marks(monkeypatch):
    """Every mark that was made."""
    made: list[Mark] = []

    class Noted(Mark):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(cluster, "Mark", Noted)
    return made


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", suite.PEERS)
def test_a_round_of_each_peer(name, marks):
    """In each form it knows: calls by two callers to two servers, checked token by token, and one at a time."""
    if (why := missing(name)) is not None:
        pytest.skip(why)
    module = peer(name)
    with tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as place, running(module, Shape(place)) as up:
        for as_lists in module.FORMS:
            found = up.round(Load(Case(64, 16, as_lists), in_flight=4), 20)
            assert 0 < found.p50_ms <= found.p99_ms
            assert found.calls_per_s > 0
            assert found.cpu_us > 0
        assert up.round(Load(Case(64, 16, module.FORMS[0]), callers=1, in_flight=1), 5).calls_per_s > 0
    assert [mark.pids() for mark in marks] == [[]]


def test_wrong_tokens_fail_the_round(marks, monkeypatch):
    """A round with a wrong token has no figures."""
    module = peer("sockets")
    with (
        tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as place,
        pytest.raises(Failed, match="3 replies with a wrong token"),
        running(module, Shape(place, callers=1)) as up,
    ):
        each = up._callers.each
        monkeypatch.setattr(
            up._callers, "each", lambda step, given: [3] if step == "check" else each(step, given), raising=True
        )
        up.round(Load(Case(64, 16, False), callers=1, in_flight=1), 5)
    assert [mark.pids() for mark in marks] == [[]]


def test_a_broken_start_leaves_nothing(marks):
    """What had been started before is gone, and the reason is told."""

    class Broken:
        @staticmethod
        def start(processes, shape):
            processes.start_ready([("relay", "benchmarks.relay.peers.sockets:relay", {"endpoint": "ipc:///no/where"})])

    with pytest.raises(Failed, match="relay failed"), running(Broken, Shape("/tmp")):
        pass
    assert [mark.pids() for mark in marks] == [[]]


@pytest.mark.timeout(180)
def test_the_runner_writes_it_and_control_c_ends_every_process(tmp_path):
    """The whole benchmark, interrupted in the middle of its work, takes all its processes along."""
    run_id = uuid.uuid4().hex
    command = [sys.executable, "-m", "benchmarks.run", "--only", "relay", "--peers", "sockets", "--quick"]
    env = {**os.environ, "ZAGENT_RUN_ID": run_id}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "relay 1/1" not in process.stderr.readline():
        assert process.poll() is None
    eventually(lambda: len(with_run_id(run_id)) > 5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode != 0
    eventually(lambda: with_run_id(run_id) == [])
