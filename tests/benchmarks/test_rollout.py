"""The rollout benchmark's arithmetic: traces, bounds, timelines, figures; and a tiny batch on a real cluster."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rollout import bounds, cluster, shown, suite, trace
from benchmarks.rollout.agent import IDS, Done, tokens
from benchmarks.rollout.bounds import Bound, Call, Engines
from benchmarks.rollout.cluster import PEERS, Clusters, Plan, Result
from benchmarks.rollout.timeline import Span, Timeline, running, spans, tail
from benchmarks.rollout.trace import Row, Turn
from benchmarks.suite import Figure, Options
from zagent.config import SimConfig
from zagent.engine.base import GenerateRequest
from zagent.engine.sim import build

#: One answer of 128 tokens after 128, then one of 64 after a tool's 36.
ROW = Row(128, (Turn(128, 2.0, 36), Turn(64)))
ENGINES = Engines(count=2, slots=3, prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)

# ---- traces ---------------------------------------------------------------------------------------------------------


def test_a_seed_makes_one_trace() -> None:
    """The same rows again; other ones from another seed; more rows begin with the same ones."""
    assert trace.generate(3, 20) == trace.generate(3, 40)[:20]
    assert trace.generate(3, 20) != trace.generate(4, 20)


def test_the_default_trace_has_a_long_tail_within_its_limits() -> None:
    """The longest row has several times the mean's tokens; nobody has more than the limits say."""
    rows = trace.generate(0, suite.ROWS)
    sampled = np.array([row.sampled_tokens for row in rows])
    assert sampled.max() > 4 * sampled.mean()
    assert np.median(sampled) < sampled.mean()
    assert max(row.response_tokens for row in rows) <= trace.ROW_TOKENS
    assert max(len(row.turns) for row in rows) <= trace.MOST_TURNS
    for row in rows:
        assert row.turns[-1].tool_s == row.turns[-1].tool_tokens == 0
        assert min(turn.response_tokens for turn in row.turns) >= 1


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Tools may be left out of a line, and lines may be empty."""
    rows = trace.generate(0, 5)
    trace.write(file := tmp_path / "trace.jsonl", rows)
    assert trace.read(file) == rows
    file.write_text('\n{"prompt_tokens": 3, "turns": [{"response_tokens": 4}]}\n')
    assert trace.read(file) == [Row(3, (Turn(4),))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "must be a JSON object"),
        ({"turns": [{"response_tokens": 1}]}, "missing keys \\['prompt_tokens'\\]"),
        ({"prompt_tokens": 1, "turns": [], "uid": 1}, "unknown keys \\['uid'\\]"),
        ({"prompt_tokens": 1, "turns": []}, "not empty"),
        ({"prompt_tokens": 0, "turns": [{"response_tokens": 1}]}, "prompt_tokens must be an int of at least 1"),
        ({"prompt_tokens": 1, "turns": [{"response_tokens": True}]}, "response_tokens must be an int"),
        ({"prompt_tokens": 1, "turns": [{"response_tokens": 1, "tool_s": -1}]}, "tool_s must be seconds"),
        ({"prompt_tokens": 1, "turns": [{"response_tokens": 1, "tool_s": float("nan")}]}, "tool_s must be seconds"),
        ({"prompt_tokens": 1, "turns": [{"response_tokens": 1, "tool_tokens": 1.5}]}, "tool_tokens must be an int"),
    ],
)
def test_what_is_no_row_is_refused_by_line(tmp_path: Path, value: Any, message: str) -> None:
    """The error names file and line."""
    file = tmp_path / "trace.jsonl"
    file.write_text("\n" + json.dumps(value))
    with pytest.raises(ValueError, match=f"trace.jsonl:2: .*{message}"):
        trace.read(file)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    """It cannot be replayed."""
    (file := tmp_path / "trace.jsonl").touch()
    with pytest.raises(ValueError, match="no rows"):
        trace.read(file)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_a_turn_finds_the_turns_before_it_in_the_cache() -> None:
    """Whole blocks of 64, and never an answer's last token: of 256 tokens 255 are held, hence 192."""
    assert list(bounds.calls(ROW)) == [Call(128, 0, 128, 2.0), Call(292, 192, 64, 0.0)]
    assert bounds.cached_share([ROW]) == 192 / 420


def test_the_bound_is_the_larger_of_work_and_longest_row() -> None:
    """Work is spread over all slots; the longest row has its tools, too."""
    busy = 128 / 100 + 128 / 10 + 100 / 100 + 64 / 10
    short = Row(100, (Turn(10),))
    few = bounds.bound([ROW, short], ENGINES)
    assert few == pytest.approx((busy / 6 + 2 / 6, busy + 2))
    assert few.seconds == few.longest_s
    many = bounds.bound([ROW] * 12, ENGINES)
    assert many.seconds == many.work_s == pytest.approx(2 * busy)


def test_the_engine_needs_what_the_bound_says() -> None:
    """Cached tokens and seconds of the simulated engine itself, called turn after turn."""
    rows = trace.generate(1, 12)
    engine = build(sim=SimConfig(), name="engine-0", index=0)

    async def cached(row: Row, number: int) -> list[int]:
        rng = np.random.default_rng(number)
        context, found = tokens(rng, row.prompt_tokens), []
        for turn in row.turns:
            params = {"max_new_tokens": turn.response_tokens, "ignore_eos": True}
            answer = await engine.generate(GenerateRequest("r", context, params))
            found.append(answer.cached_tokens)
            context = np.concatenate([context, answer.token_ids, tokens(rng, turn.tool_tokens)])
        return found

    async def all_rows() -> list[list[int]]:
        await engine.start()
        return [await cached(row, number) for number, row in enumerate(rows)]

    assert asyncio.run(all_rows()) == [[call.cached for call in bounds.calls(row)] for row in rows]


def test_ids_are_plain_ones_of_the_built_in_model() -> None:
    """And the same for the same row."""
    ids = tokens(np.random.default_rng(0), 1000)
    assert ids.dtype == np.int32
    assert set(ids.tolist()) <= set(IDS)
    assert np.array_equal(ids, tokens(np.random.default_rng(0), 1000))


# ---- timelines ------------------------------------------------------------------------------------------------------


def test_calls_lie_where_the_broker_or_the_loop_sent_them() -> None:
    """A session's calls go by the order in which they end; the start is reckoned from the end."""
    calls = [
        Done("a", "", 100, 0, 20, end=18.0),
        Done("a", "", 100, 50, 10, end=14.0),
        Done("", "engine-1", 100, 100, 5, end=11.0),
    ]
    found = spans(calls, {"a": ["engine-0", "engine-1"]}, ENGINES, began=10.0)
    assert found == [Span("engine-1", 0.5, 1.0), Span("engine-0", 2.5, 4.0), Span("engine-1", 5.0, 8.0)]


def test_the_tail_begins_when_the_first_engine_is_dry() -> None:
    """Six slots for six seconds, of which one call takes three and another two."""
    timeline = Timeline([Span("engine-0", 0.0, 4.0), Span("engine-1", 2.0, 7.0), Span("engine-1", 6.0, 8.0)], 10.0)
    assert tail(timeline, ENGINES) == (4.0, 6 * 6 - 3 - 2)
    idle = Timeline([Span("engine-0", 0.0, 4.0)], 5.0)
    assert tail(idle, ENGINES) == (0.0, 6 * 5 - 4)


def test_running_calls_are_counted_at_each_time() -> None:
    """Of one engine; a call counts from its start, and not any more at its end."""
    timeline = Timeline([Span("e", 0.0, 2.0), Span("e", 1.0, 3.0), Span("f", 0.0, 9.0)], 10.0)
    assert running(timeline, "e", np.array([0.0, 1.5, 2.0, 3.0])).tolist() == [1, 2, 1, 0]


# ---- plans and figures ----------------------------------------------------------------------------------------------


def test_a_case_takes_as_long_as_it_says() -> None:
    """Time is compressed, speeds and all, and never stretched."""
    rows = trace.generate(0, 64)
    plan, again = suite.planned([rows, rows], suite.Case(part=4, slots=2, bound_s=1.5), 1.5)
    assert plan == again
    assert len(plan.rows) == 16
    assert plan.bound.seconds == pytest.approx(1.5)
    assert plan.running.decode_tokens_per_s == pytest.approx(60 * plan.speedup)
    assert plan.running.seconds(100, 0, 10) == pytest.approx(plan.engines.seconds(100, 0, 10) / plan.speedup)
    assert suite.planned([rows], suite.CASES[0], 1e9)[0].speedup == 1


def test_the_cases_are_what_they_are_said_to_be() -> None:
    """Work decides, both are near each other, the longest row decides."""
    rows = trace.generate(0, suite.ROWS)
    found = [suite.planned([rows], case, 1.0)[0].bound for case in suite.CASES]
    work, both, longest = (one.longest_s / one.work_s for one in found)
    assert work < 0.3
    assert 0.5 < both < 1.5
    assert longest > 2.0


def test_every_repeat_has_a_trace_of_its_own(tmp_path: Path) -> None:
    """But the user's, which is replayed as often."""
    options = Options(quick=False, repeats=2, peers=("zagent",), trace=None, out=tmp_path)
    assert suite.traces_of(options) == [trace.generate(0, suite.ROWS), trace.generate(1, suite.ROWS)]
    trace.write(file := tmp_path / "trace.jsonl", rows := trace.generate(9, 150))
    assert suite.traces_of(replace(options, trace=file)) == [rows, rows]
    assert suite.traces_of(replace(options, trace=file, repeats=None, quick=True)) == [rows[: suite.QUICK_ROWS]]


def test_figures_are_taken_from_the_result() -> None:
    """Of two calls on two engines."""
    calls = [Done("", "engine-0", 100, 50, 20, end=12.0), Done("", "engine-1", 100, 0, 30, end=14.0)]
    plan = Plan([Row(100, (Turn(20),))], ENGINES, speedup=1.0)
    result = Result(Timeline(spans(calls, {}, ENGINES, began=10.0), 5.0), calls)
    found = {name: value for name, value, _ in suite.measured(result, plan)}
    assert found["makespan_s"] == 5.0
    assert found["over_bound"] == pytest.approx(5.0 / 3.0)
    assert (found["answered_s"], found["dry_s"]) == (4.0, 2.0)
    assert found["tail_idle_s"] == pytest.approx(6 * 3 - 2)
    assert found["tail_share"] == pytest.approx(16 / 30)
    assert (found["tokens_per_s"], found["cached_share"]) == (10.0, 0.25)


def test_peers_differ_in_the_routing_only(tmp_path: Path) -> None:
    """Of the cluster; room for all rows at once, and for the longest of them."""
    plan = Plan([ROW, Row(7, (Turn(3),))], ENGINES, speedup=2.0)
    ours, sticky = (cluster.config_of(plan, PEERS[name].overrides, tmp_path) for name in ("zagent", "sticky"))
    assert sticky.routing.rebind_over is None
    assert ours.routing.rebind_over is not None
    assert ours.model_copy(update={"routing": sticky.routing}) == sticky
    assert (ours.rollout.prompt_length, ours.rollout.response_length) == (128, 228)
    assert (ours.engine.count, ours.engine.sim.max_batch, ours.engine.sim.decode_tokens_per_s) == (2, 3, 20.0)


def test_the_broker_s_record_says_where_sessions_went(tmp_path: Path) -> None:
    """Of the engines only, in order."""
    lines = [("engine", "s", "engine-1"), ("worker", "", "worker-0"), ("engine", "s", "engine-0")]
    file = tmp_path / "record"
    file.write_text("".join(json.dumps({"pool": p, "session": s, "member": m}) + "\n" for p, s, m in lines))
    assert cluster.members_of(file) == {"s": ["engine-1", "engine-0"]}


def made_figures() -> list[Figure]:
    """Two repeats of two peers."""
    case = "4 rows, 8 × 4 slots"
    facts = {"work_s": 2.0, "longest_s": 1.0, "cached_share": 0.5, "speedup": 10.0, "rows": 4.0, "calls": 8.0}
    figures = [Figure("rollout", case, shown.BOUND, 0, name, value, "") for name, value in facts.items()]
    for peer, factor in (("zagent", 1.0), ("static", 1.5)):
        for repeat in (0, 1):
            values = {
                "makespan_s": 2.2 * factor,
                "over_bound": 1.1 * factor,
                "answered_over_bound": 1.05 * factor,
                "tail_share": 0.1,
                "tokens_per_s": 1000 / factor,
                "cached_share": 0.4,
            }
            figures += [Figure("rollout", case, peer, repeat, name, value, "") for name, value in values.items()]
    return figures


def test_the_table_has_bounds_and_ratios() -> None:
    """Each peer beside the bound and beside zagent."""
    lines = shown.table(made_figures()).splitlines()
    assert lines[2] == "| 4 rows, 8 × 4 slots | 8 | 10.0 | 2.0 | 1.0 | 50% |"
    assert lines[-2].startswith("| 4 rows, 8 × 4 slots | zagent | 1.10 (1.10–1.10) | 1.05 | 1 |")
    assert lines[-1].startswith("| 4 rows, 8 × 4 slots | static | 1.65 (1.65–1.65) | 1.58 | 1.50 (1.50–1.50) |")


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    """One line an engine and time; none without the file."""
    plan = Plan([ROW], ENGINES, speedup=1.0)
    result = Result(Timeline([Span("engine-0", 0.0, 2.0)], 4.0), [])
    file = tmp_path / shown.TIMELINE
    assert shown.read_timeline(file) == {}
    suite.write_timeline(file, "case", "zagent", result, plan)
    found = shown.read_timeline(file)["case", "zagent"]
    assert list(found) == ["engine-0", "engine-1"]
    assert found["engine-0"][0] == (0.0, 1)
    assert found["engine-0"][-1] == (4.0, 0)


def test_plots_are_drawn(tmp_path: Path) -> None:
    """Bars, and what the engines of each of the two ran."""
    pytest.importorskip("matplotlib", reason="drawn only with the bench extra")
    figures = made_figures()
    plan = Plan([ROW], ENGINES, speedup=1.0)
    result = Result(Timeline([Span("engine-0", 0.0, 2.0)], 4.0), [])
    for peer in ("zagent", "static"):
        suite.write_timeline(tmp_path / shown.TIMELINE, figures[0].case, peer, result, plan)
    files = shown.plots(figures, tmp_path)
    assert [file.name for file in files] == ["rollout.png", "rollout-zagent.png", "rollout-static.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


# ---- a real cluster -------------------------------------------------------------------------------------------------


def test_every_peer_replays_the_same_rows(tmp_path: Path) -> None:
    """All tokens of all rows, on the engines that the timeline names; sessions that stay find their cache."""
    rows = trace.generate(0, 12)
    plan = Plan(rows, Engines(count=2, slots=4), speedup=1000.0, workers=2)
    with Clusters([plan], tmp_path) as clusters:
        results = {name: clusters.run(plan, PEERS[name]) for name in ("sticky", "static", "least-requests", "random")}
    wanted = sorted((call.prompt, call.new) for row in rows for call in bounds.calls(row))
    for result in results.values():
        assert sorted((call.prompt, call.new) for call in result.calls) == wanted
        assert {span.engine for span in result.timeline.spans} == set(plan.names)
        assert result.timeline.makespan_s >= plan.bound.seconds
        assert max(span.end for span in result.timeline.spans) <= result.timeline.makespan_s
    assert results["sticky"].cached_share == bounds.cached_share(rows)
    assert results["static"].cached_share == bounds.cached_share(rows)
    assert results["random"].cached_share < bounds.cached_share(rows)


def test_bounds_are_seconds() -> None:
    """The larger of the two."""
    assert Bound(1.0, 2.0).seconds == 2.0
