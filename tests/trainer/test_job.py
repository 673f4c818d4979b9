"""The batch job, with a manager that needs no processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_manager import FakeManager
from support.outcomes import failed, ok
from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, InputError, StartupError
from zagent.trainer.job import INTERRUPTED, run_job
from zagent.types import Outcome


def answered(i: int, batch: DataProto) -> Outcome:
    values = batch[i].non_tensor_batch
    outcome = ok(i, extra_fields={"response_text": f"answer {i}"})
    return Outcome(i, values["uid"], values["sample"], "ok", outcome.output)


def some_fail(i: int, batch: DataProto) -> Outcome:
    return failed(i) if i == 1 else answered(i, batch)


class Job:
    """A prompts file and an outcomes file in a directory of their own."""

    def __init__(self, where: Path) -> None:
        self.prompts, self.out = where / "p.jsonl", where / "o.jsonl"
        self.prompts.write_text('{"prompt": "a", "uid": "A", "data_source": "d"}\n{"prompt": "b"}\n')

    def run(self, manager: FakeManager, n: int = 1, **kwargs: Any) -> int:
        config = Config.from_dict({"rollout": {"n": n}})
        return run_job(config, prompts=self.prompts, out=self.out, launch=manager.launch, **kwargs)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_every_sample_is_one_line(job: Job) -> None:
    """n lines per prompt with uid, sample, conversation and what was passed; status 0."""
    manager = FakeManager(answered)
    assert job.run(manager, n=2) == 0
    lines = {(line["uid"], line["sample"]): line for line in job.lines()}
    assert set(lines) == {("A", 0), ("A", 1), ("line-2", 0), ("line-2", 1)}
    assert lines["A", 1]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "answer 1"},
    ]
    assert lines["A", 1]["data_source"] == "d"
    assert "data_source" not in lines["line-2", 0]
    assert manager.stream_closed
    assert manager.closed


def test_an_earlier_output_is_replaced(job: Job) -> None:
    """Outcomes of two runs are never mixed."""
    job.out.write_text("old\n")
    job.run(FakeManager(answered))
    assert len(job.lines()) == 2


def test_a_failed_row_makes_status_1(job: Job) -> None:
    """Its line says why; the others are there."""
    assert job.run(FakeManager(some_fail)) == 1
    assert {line["status"]: line["error"] for line in job.lines()} == {"ok": None, "failed": "LoopError: it broke"}


def test_a_broken_line_stops_everything_before_it_starts(job: Job) -> None:
    """File and line number; nothing is launched; an earlier output stays."""
    job.prompts.write_text('{"prompt": "a"}\n{"prompt"\n')
    job.out.write_text("old\n")
    manager = FakeManager(answered)
    with pytest.raises(InputError, match=r"p\.jsonl:2: not JSON"):
        job.run(manager)
    assert manager.launched is None
    assert job.out.read_text() == "old\n"


def test_keep_going_runs_the_other_lines(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The broken line is reported, the rest runs, and the status is 1."""
    job.prompts.write_text('{"prompt": "a"}\n{"prompt"\n{"prompt": "c"}\n')
    assert job.run(FakeManager(answered), keep_going=True) == 1
    assert {line["uid"] for line in job.lines()} == {"line-1", "line-3"}
    assert f"skipped: {job.prompts}:2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n\n", '{"prompt"\n'])
def test_a_file_without_prompts_is_refused(job: Job, text: str) -> None:
    """Also where all its lines were skipped."""
    job.prompts.write_text(text)
    with pytest.raises(InputError, match="no prompts"):
        job.run(FakeManager(answered), keep_going=True)


def test_an_unwritable_output_is_found_before_the_launch(job: Job) -> None:
    """No engine starts for outcomes that cannot be kept."""
    manager = FakeManager(answered)
    job.out = job.out.parent / "missing" / "o.jsonl"
    with pytest.raises(InputError, match="cannot be written"):
        job.run(manager)
    assert manager.launched is None


def test_a_launch_that_fails_leaves_the_old_outcomes(job: Job) -> None:
    """They are dropped only when the work begins."""

    def launch(config: Config) -> FakeManager:
        raise StartupError("engine-0 died")

    job.out.write_text("old\n")
    with pytest.raises(StartupError, match="engine-0 died"):
        run_job(Config(), prompts=job.prompts, out=job.out, launch=launch)
    assert job.out.read_text() == "old\n"


def test_a_crash_half_way_keeps_what_was_written(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The error gets through, the manager is closed, the file has the finished rows."""
    manager = FakeManager(lambda i, batch: ConnectionLost("gone") if i == 0 else answered(i, batch))
    with pytest.raises(ConnectionLost, match="gone"):
        job.run(manager)
    assert manager.closed
    assert [line["uid"] for line in job.lines()] == ["line-2"]
    assert f"1 outcomes written to {job.out}" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_written(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 130, manager and stream closed, a table of what was done."""
    manager = FakeManager(lambda i, batch: KeyboardInterrupt() if i == 0 else answered(i, batch))
    assert job.run(manager) == INTERRUPTED == 130
    assert manager.closed
    assert manager.stream_closed
    assert [line["uid"] for line in job.lines()] == ["line-2"]
    assert "2 (1 ok, 1 not run)" in capsys.readouterr().out


def test_ctrl_c_while_starting(job: Job) -> None:
    """Status 130 there, too, and no output is left behind."""

    def launch(config: Config) -> FakeManager:
        raise KeyboardInterrupt

    assert run_job(Config(), prompts=job.prompts, out=job.out, launch=launch) == INTERRUPTED
    assert not job.out.exists()


def test_a_failed_write_closes_the_stream(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that could not be kept are not run to the end."""

    def full(self: Any, line: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("zagent.trainer.outcomes_file.OutcomesFile.write", full)
    manager = FakeManager(answered)
    with pytest.raises(OSError, match="disk full"):
        job.run(manager)
    assert manager.stream_closed
    assert manager.closed


def test_a_row_without_outcome_is_no_success(job: Job) -> None:
    """A stream that ends early does not pass for a finished job."""

    class Short(FakeManager):
        def stream(self, batch: DataProto) -> Iterator[Outcome]:
            return iter([answered(0, batch)])

    assert job.run(Short(answered)) == 1


def test_the_end_shows_a_table(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows, tokens and engines on stdout, progress on stderr."""
    assert job.run(FakeManager(some_fail)) == 1
    shown = capsys.readouterr()
    assert "2 (1 failed, 1 ok)" in shown.out
    assert "engine-0  ready            2         7     25%" in shown.out
    assert f"2 outcomes written to {job.out}" in shown.out
    assert "2/2 rows" in shown.err


def test_engines_that_cannot_be_asked_do_not_fail_the_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """All outcomes are written by then; the table says what it lacks."""
    assert job.run(FakeManager(answered, status=ConnectionLost("gone"))) == 0
    assert "no status of the engines: ConnectionLost: gone" in capsys.readouterr().err
