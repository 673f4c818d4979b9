"""The relay benchmark runs, notices a single wrong token, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bare_sockets import answer
from benchmarks.caller import simulated, wrong_replies
from benchmarks.processes import Failed, Processes
from benchmarks.relay import measured
from benchmarks.traffic import Case, Result, Round, prompts
from support.processes import eventually, with_run_id

ROOT = Path(__file__).parents[2]
CASES = [Case(64, 16, as_lists=False), Case(64, 16, as_lists=True)]


def start(run_id: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.relay", "--quick", "--repeats", "1", *arguments]
    env = {**os.environ, "ZAGENT_RUN_ID": run_id}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def right_replies(round_: Round, given: list[Any]) -> list[Any]:
    rule = simulated(round_.case) if round_.way == "zagent" else lambda ids: answer(ids, round_.case.response)
    replies = [rule(np.asarray(prompt, np.int32)) for prompt in given]
    return [tuple(part.tolist() for part in reply) for reply in replies] if round_.case.as_lists else replies


def test_a_quick_run_prints_and_writes_its_figures(tmp_path):
    """Both ways are measured on real processes, and nothing of them is left."""
    run_id, file = uuid.uuid4().hex, tmp_path / "figures.json"
    process = start(run_id, "--only", "1024/128 arrays", "--json", str(file))
    output, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    assert "| 1024/128 arrays |" in output
    (row,) = json.loads(file.read_text())["rows"]
    assert all(row["loaded"][0][way]["calls_per_s"] > 0 for way in ("zagent", "sockets"))
    assert with_run_id(run_id) == []


def test_control_c_ends_every_process():
    """Interrupted in the middle of its work, it takes all its processes along."""
    run_id = uuid.uuid4().hex
    process = start(run_id)
    assert process.stderr is not None
    assert "pair 1/1" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode != 0
    eventually(lambda: with_run_id(run_id) == [])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["zagent", "sockets"])
def test_right_replies_pass_the_check(way, case):
    """What the answering side's rule gives is right, as arrays and as lists."""
    round_ = Round(way, case, 5, 1, seed=3)
    given = prompts(round_)
    assert wrong_replies(round_, given, right_replies(round_, given)) == 0


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["zagent", "sockets"])
@pytest.mark.parametrize("part", [0, 1], ids=["id", "log-probability"])
def test_one_wrong_number_is_noticed(way, case, part):
    """A single id or log-probability off by one makes its reply wrong."""
    round_ = Round(way, case, 5, 1, seed=3)
    given = prompts(round_)
    replies = right_replies(round_, given)
    spoilt = [list(numbers) if case.as_lists else numbers.copy() for numbers in replies[2]]
    spoilt[part][7] += 1
    replies[2] = tuple(spoilt)
    assert wrong_replies(round_, given, replies) == 1


@pytest.mark.parametrize("way", ["zagent", "sockets"])
def test_swapped_replies_are_noticed(way):
    """A reply to another call's prompt is wrong, though its tokens are right for that one."""
    round_ = Round(way, CASES[0], 2, 1, seed=3)
    given = prompts(round_)
    assert wrong_replies(round_, given, right_replies(round_, given)[::-1]) == 2


def test_a_reply_in_the_wrong_form_is_wrong():
    """Arrays where lists were sent, or the other way round, do not pass."""
    round_ = Round("zagent", CASES[0], 1, 1, seed=3)
    given = prompts(round_)
    as_lists = [tuple(part.tolist() for part in reply) for reply in right_replies(round_, given)]
    assert wrong_replies(round_, given, as_lists) == 1


def test_figures_of_wrong_replies_are_refused():
    """A round with a wrong token has no figures."""
    with pytest.raises(Failed, match="1 replies with a wrong token"):
        measured([Result(0.0, 1.0, 0.5, [0.1], wrong=1)], 0.5)


def test_callers_count_as_one():
    """Calls per second span the first start to the last end; processor time is summed over all processes."""
    found = measured([Result(0.0, 1.0, 0.5, [0.1, 0.1]), Result(1.0, 2.0, 0.5, [0.3, 0.3])], served_s=1.0)
    assert (found.calls_per_s, found.p50_ms, found.cpu_us) == (2.0, pytest.approx(200.0), 500_000.0)


def test_a_process_that_breaks_is_named():
    """Its own traceback is in the error, and it is gone."""
    with Processes() as processes, pytest.raises(Failed, match=r"odd failed:(.|\n)*KeyError"):
        processes.start_ready([("odd", "benchmarks.processes:room", {})])
