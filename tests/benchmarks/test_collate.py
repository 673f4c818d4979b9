"""The collate benchmark compares before it measures, and both sides make the same tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import collate
from benchmarks.collate import PROMPT_LENGTH, RESPONSE_LENGTH, Case, check_equal, outcomes
from benchmarks.processes import Failed
from benchmarks.suite import Figure, Options

TENSORS = ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")


@pytest.mark.parametrize("case", [Case(5), Case(5, lists=True)], ids=str)
def test_both_sides_make_the_same_tensors(case):
    """All of the trainer's, of the full width."""
    made = {peer: way() for peer, way in collate._ways(case).items()}
    check_equal(made)
    assert {*TENSORS, "rollout_log_probs", "rm_scores"} <= set(made["tokenizer.pad"])
    assert made["zagent"]["input_ids"].shape == (5, PROMPT_LENGTH + RESPONSE_LENGTH)


def test_one_wrong_number_is_noticed():
    """So are another dtype and another shape."""
    ours = torch.zeros(2, 3, dtype=torch.int64)
    wrong = ours.clone()
    wrong[1, 2] = 1
    for theirs in (wrong, ours.to(torch.int32), ours[:, :2]):
        with pytest.raises(Failed, match=r"tokenizer\.pad and zagent differ in prompts"):
            check_equal({"zagent": {"prompts": ours}, "tokenizer.pad": {"prompts": theirs}})


def test_lengths_have_a_long_tail():
    """Some reach the limit, half stay far below it, none is empty; the same seed gives the same rows."""
    made = [outcome.output for outcome in outcomes(400, seed=1)]
    lengths = np.array([len(output.response_ids) for output in made if output])
    assert lengths.max() == RESPONSE_LENGTH and lengths.min() >= collate.SHORTEST
    assert np.median(lengths) < RESPONSE_LENGTH / 4
    (again,) = outcomes(1, seed=1)
    assert again.output and made[0] and np.array_equal(again.output.response_ids, made[0].response_ids)


def test_a_run_records_pairs(monkeypatch, tmp_path):
    """Both peers, each repeat; torch has as many threads afterwards as before."""
    monkeypatch.setattr(collate, "QUICK", (Case(3),))
    threads, figures = torch.get_num_threads(), []
    collate.run(Options(True, 2, collate.PEERS, None, tmp_path), figures.append)
    assert torch.get_num_threads() == threads
    assert {(f.peer, f.repeat, f.name) for f in figures} == {
        (peer, repeat, name) for peer in collate.PEERS for repeat in (0, 1) for name in ("rows_per_s", "cpu_us")
    }
    assert all(math.isfinite(f.value) for f in figures)


def figures(speed: float = 2000.0) -> list[Figure]:
    made = []
    for peer, rows_per_s in (("zagent", speed), ("tokenizer.pad", 100.0)):
        for case in ("64 rows", "64 rows, lists"):
            made.append(Figure("collate", case, peer, 0, "rows_per_s", rows_per_s, "1/s"))
            made.append(Figure("collate", case, peer, 0, "cpu_us", 1e6 / rows_per_s, "µs"))
    return made


def test_the_table_has_speeds_and_their_ratio():
    """One line a case."""
    lines = collate.table(figures()).splitlines()
    assert lines[2] == "| 64 rows | 2,000 | 500 | 100 | 10,000 | 20.0 (20.0–20.0) |"
    assert lines[3].startswith("| 64 rows, lists |")


def test_the_plot_is_a_picture(tmp_path):
    """A PNG file where it was asked for."""
    pytest.importorskip("matplotlib", reason="drawn only with the bench extra")
    (file,) = collate.plots(figures(), tmp_path)
    assert file == Path(tmp_path / "collate.png") and file.read_bytes().startswith(b"\x89PNG")
