"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zagent import launch
from zagent.errors import ConfigError, StartupError


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Configurations that would have been launched."""
    seen: list[object] = []
    monkeypatch.setattr(launch, "supervise", lambda config, *_args, **_rest: seen.append(config))
    return seen


def test_without_a_job_it_serves_the_overridden_configuration(unstarted: list[object]) -> None:
    """key=value arguments reach the configuration."""
    assert launch.main(["engine.count=3", "worker.count=5"]) == 0
    assert unstarted[0].engine.count == 3  # type: ignore[attr-defined]
    assert unstarted[0].worker.count == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.cuont=3"], "unknown key 'engine.cuont', did you mean 'engine.count'?"),
        (["worker.count=many"], "worker.count='many'"),
        (["--config", "/missing.yaml"], "/missing.yaml"),
        (["nonsense"], "'nonsense' is not of the form key=value"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(
    arguments: list[str], message: str, unstarted: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, and nothing has been started."""
    assert launch.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert unstarted == []


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("x"), 2), (StartupError("x"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2: the caller's fault; 1: ours or the machine's; 130: Ctrl-C."""

    def fail(*_args: object, **_rest: object) -> None:
        raise error

    monkeypatch.setattr(launch, "supervise", fail)
    assert launch.main([]) == status


@pytest.mark.parametrize(
    "arguments", [["--prompts", "p"], ["--out", "o"], ["--demo", "--prompts", "p", "--out", "o"], ["--unknown"]]
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    """argparse's status 2."""
    with pytest.raises(SystemExit) as leaving:
        launch.main(arguments)
    assert leaving.value.code == 2


def test_batch_job_is_called_with_files_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options may stand between overrides; the job's status is ours."""
    called: list[tuple[object, dict[str, object]]] = []

    def run_job(config: object, **rest: object) -> int:
        called.append((config, rest))
        return 1

    monkeypatch.setattr("zagent.trainer.job.run_job", run_job)
    arguments = ["rollout.n=2", "--prompts", "p.jsonl", "--keep-going", "--out", "o.jsonl", "worker.count=1"]
    assert launch.main(arguments) == 1
    [(config, rest)] = called
    assert config.rollout.n == 2  # type: ignore[attr-defined]
    assert rest == {"prompts": Path("p.jsonl"), "out": Path("o.jsonl"), "keep_going": True}


def test_demo_writes_below_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without --out the demonstration has a place of its own, which is made."""
    called: list[tuple[str, Path]] = []
    monkeypatch.setattr("zagent.demo.run.run_demo", lambda config, out: called.append((config.model.path, out)) or 0)
    monkeypatch.chdir(tmp_path)
    assert launch.main(["--demo"]) == 0
    assert called == [("tiny", Path("outputs/demo.jsonl"))]
    assert (tmp_path / "outputs").is_dir()


@pytest.mark.parametrize(("name", "status"), [("o.jsonl", 1), ("elsewhere", None)])
def test_a_disk_that_fills_up_is_one_line(
    name: str, status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the outcomes file; an error of any other file is a bug, and shown as one."""

    def run_job(*_args: object, **_rest: object) -> int:
        raise OSError(28, "No space left, after 7 outcomes", name)

    monkeypatch.setattr("zagent.trainer.job.run_job", run_job)
    arguments = ["--prompts", "p.jsonl", "--out", "o.jsonl"]
    if status is None:
        with pytest.raises(OSError, match="elsewhere"):
            launch.main(arguments)
    else:
        assert launch.main(arguments) == status
        assert capsys.readouterr().err == "zagent: outcomes file o.jsonl: No space left, after 7 outcomes\n"
