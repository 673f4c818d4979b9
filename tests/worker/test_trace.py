"""What a tracer is told, and what its own faults cost: nobody anything."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_tokenizer import tiny_tokenizer
from support.virtual_clock import run
from zagent.config import TraceConfig
from zagent.errors import ConfigError
from zagent.types import TokenOutput
from zagent.worker.trace import JsonlTracer, RowTrace, Tracing, load_tracer

ROW = {"trajectory": {"step": 5, "sample_index": 7, "rollout_n": 1, "validate": False}, "uid": "u", "sample": 2}
JSONL = "zagent.worker.trace.JsonlTracer"


class Recorder:
    """A tracer that remembers."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Broken(Recorder):
    """One that fails, and fails to close."""

    def event(self, event: dict[str, Any]) -> None:
        super().event(event)
        raise {"b": asyncio.CancelledError, "end": SystemExit}.get(event["kind"], OSError)("full disk")

    async def close(self) -> None:
        raise OSError("full disk")


class Slow(Recorder):
    """One that takes its time to close."""

    async def close(self) -> None:
        await asyncio.sleep(10_000)


class Takes:
    """One whose constructor takes arguments."""

    def __init__(self, depth: int) -> None:
        if depth > 3:
            raise ValueError("too deep")

    def event(self, event: dict[str, Any]) -> None:
        """Nothing."""


class Async:
    """One that is no tracer."""

    async def event(self, event: dict[str, Any]) -> None:
        """Never awaited."""


def row_trace(tracer: Any, *, token2text: bool = True, tokenizer: Any = None) -> RowTrace:
    return RowTrace(Tracing(tracer, "worker-3", tokenizer, token2text=token2text), ROW, 2, "abc")


def test_every_event_says_whose_it_is() -> None:
    """The trajectory's info, uid, sample, attempt (pitfall K45), session, worker, time; fields cannot hide them."""
    tracer = Recorder()
    row_trace(tracer)("search", query="cats", uid="mine", kind="other", time=0)
    (event,) = tracer.events
    assert event.pop("time") > 1.6e9
    assert event == {
        "kind": "search", "query": "cats", **ROW, "attempt": 2, "session": "abc", "worker": "worker-3",
    }  # fmt: skip


def test_nothing_comes_after_the_end() -> None:
    """Not from a loop that was left behind, either."""
    tracer = Recorder()
    trace = row_trace(tracer)
    for kind in ("a", "end", "b", "end"):
        trace(kind)
    assert [event["kind"] for event in tracer.events] == ["a", "end"]


def generated(tracer: Any, **options: Any) -> dict[str, Any]:
    prompt = np.array([*b"<hi", 256], np.int32)  # as the tokenizer numbers bytes, below
    output = TokenOutput(prompt[1:3], stop_reason="length", cached_tokens=2)
    asyncio.run(row_trace(tracer, **options).generated(4, "s", prompt, output, 1.5))
    event = dict(tracer.events[-1])
    assert (event["call"], event["request"], event["seconds"], event["stop_reason"]) == (4, "s", 1.5, "length")
    assert (event["prompt_tokens"], event["response_tokens"], event["cached_tokens"]) == (4, 2, 2)
    assert event["prompt_ids"] == prompt.tolist()
    assert event["response_ids"] == prompt[1:3].tolist()
    return event


def test_an_engine_call_has_ids_and_text() -> None:
    """Special tokens included (pitfall F5)."""
    tokenizer = tiny_tokenizer()
    event = generated(Recorder(), tokenizer=tokenizer)
    assert event["prompt_text"] == tokenizer.decode(event["prompt_ids"], skip_special_tokens=False)
    assert "<|endoftext|>" in event["prompt_text"]
    assert event["response_text"] == tokenizer.decode(event["response_ids"])


def test_without_token2text_nothing_is_decoded(caplog: pytest.LogCaptureFixture) -> None:
    """Ids only; no tokenizer is asked."""
    event = generated(Recorder(), token2text=False, tokenizer=None)
    assert "prompt_text" not in event
    assert "response_text" not in event
    assert not caplog.records


def test_ids_that_cannot_be_decoded_are_told_as_ids(caplog: pytest.LogCaptureFixture) -> None:
    """And a line of log."""
    assert "prompt_text" not in generated(Recorder(), tokenizer=object())
    assert "the tracer fails at 'generate' events" in caplog.text


def test_a_tracer_that_raises_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    """The trajectory does not see it; the tracer goes on to be told."""
    tracer = Broken()
    trace = row_trace(tracer)
    for kind in ("a", "a", "b", "end"):
        trace(kind)
    assert len(tracer.events) == 4
    assert [r.message.split("'")[1] for r in caplog.records if r.levelno == logging.ERROR] == ["a", "b", "end"]
    assert "full disk" in caplog.text


@pytest.mark.parametrize(("tracer", "said"), [(Recorder(), ""), (Broken(), "full disk"), (Slow(), "longer than 2 s")])
def test_closing_is_bounded_and_its_errors_are_logged(tracer: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The worker stops whatever its tracer does; one without `close` needs none."""
    run(Tracing(tracer, "w", None, token2text=False).close())
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_events_are_lines_of_a_file(tmp_path: Path) -> None:
    """Strict JSON, with the operating system at once; directories are made."""
    tracer = JsonlTracer(str(tmp_path / "new" / "{worker}-{pid}.jsonl"), worker="worker-1")
    assert tracer.path == tmp_path / "new" / f"worker-1-{os.getpid()}.jsonl"
    tracer.event({"kind": "a", "x": float("nan"), "ids": np.arange(2), "text": "é\nü\ud83d"})
    tracer.event({"kind": "b", "set": {1}})
    lines = tracer.path.read_bytes().decode().splitlines()
    assert json.loads(lines[0]) == {"kind": "a", "x": None, "ids": [0, 1], "text": "é\nü\ud83d"}
    assert json.loads(lines[1]) == {"kind": "b", "set": "{1}"}
    asyncio.run(tracer.close())


def test_several_may_share_a_file(tmp_path: Path) -> None:
    """Lines are appended whole; what the file held before stays."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"kind": "old"}\n')
    tracers = [JsonlTracer(str(path)) for _ in range(2)]
    for number in range(20):
        tracers[number % 2].event({"number": number, "long": "x" * 20_000})
    assert [json.loads(line).get("number") for line in path.read_text().splitlines()] == [None, *range(20)]
    for tracer in tracers:
        asyncio.run(tracer.close())


# ---- finding it -----------------------------------------------------------------------------------------------------


def test_no_target_no_tracer() -> None:
    """By default; and no `Tracing`, so that nothing is computed for it."""
    assert load_tracer(TraceConfig(), "w") is None
    assert Tracing.load(TraceConfig(), "w", None) is None


def test_the_target_is_made_with_its_arguments(tmp_path: Path) -> None:
    """And with the worker's name, if it takes it."""
    tracer = load_tracer(TraceConfig(target=JSONL, args={"path": str(tmp_path / "{worker}")}), "worker-7")
    assert isinstance(tracer, JsonlTracer)
    assert tracer.path == tmp_path / "worker-7"
    asyncio.run(tracer.close())
    assert isinstance(load_tracer(TraceConfig(target=f"{__name__}.Takes", args={"depth": 3}), "w"), Takes)


@pytest.mark.parametrize(
    ("target", "args", "why"),
    [
        ("no_such_module.T", {}, "No module named 'no_such_module'"),
        (f"{__name__}.JSONL", {}, "is a str, neither class nor function"),
        (f"{__name__}.Takes", {"depth": 4}, r"with trace.args=\{'depth': 4\}: ValueError: too deep"),
        (f"{__name__}.Takes", {}, "missing 1 required positional argument: 'depth'"),
        (f"{__name__}.Async", {}, "a tracer needs a plain"),
        ("builtins.object", {}, "a tracer needs a plain"),
        (JSONL, {"path": "/proc/none/t.jsonl"}, "FileNotFoundError.*/proc/none"),
    ],
)
def test_a_target_that_cannot_be_used(target: str, args: dict[str, Any], why: str) -> None:
    """`ConfigError` with key, value and reason, at the start."""
    with pytest.raises(ConfigError, match=rf"(?s)trace.target='{target}'.*{why}"):
        load_tracer(TraceConfig(target=target, args=args), "w")
