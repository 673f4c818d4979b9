"""A trainer in an environment without sglang, real SGLang engines in another."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support import foreign_trainer
from support.environments import environment

TRAINER = foreign_trainer.__file__


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("trainers") / "env", without=["sglang"])


def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, TRAINER, *arguments], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.sglang
@pytest.mark.timeout(420)
def test_only_the_engines_need_sglang(trainers: str, tmp_path: Path) -> None:
    """Trainer, launcher, broker and workers run, tools and SGLang's own parser included, where it cannot be imported;
    the engine has the other interpreter."""
    engines = environment(tmp_path / "engines")
    done = run(trainers, engines, str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["trainer_finds_sglang"]
    assert report["imported"] == []
    assert report["commands"] == {"engine-0": engines, "worker-0": trainers}
    assert report["statuses"] == ["ok"] * foreign_trainer.ROWS
    assert min(report["turns"]) >= 4  # one call of the calculator at least
    assert report["sampled"] > 0
    assert report["log_probs"] < 0


def test_an_environment_that_will_not_do_is_refused_before_anything_starts(trainers: str, tmp_path: Path) -> None:
    """The trainer's own, for one: a `ConfigError` that names it, and no log of any process."""
    done = run(trainers, trainers, str(tmp_path / "logs"))
    assert done.returncode == 1
    assert f"ConfigError: engine.python={trainers}: engine.kind=sglang needs sglang" in done.stderr
    assert not (tmp_path / "logs").exists()
