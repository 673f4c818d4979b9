"""Which interpreter engines run under, and what is said of one that will not do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import interpreter
from launcher.engines import python_of
from launcher.interpreter import check_interpreters, environment_of
from support.environments import environment
from zagent import __version__
from zagent.config import Config, EngineConfig
from zagent.errors import ConfigError


@pytest.fixture(scope="module")
def without_sglang(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("other") / "env", without=["sglang"])


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def check(python: str, *overrides: str) -> None:
    check_interpreters(Config.load(overrides=[f"engine.python={python}", *overrides]))


def refusal(python: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        check(python, *overrides)
    assert str(e.value).startswith(f"engine.python={python}")
    return str(e.value)


def test_a_good_one_is_taken(without_sglang: str) -> None:
    """Simulated engines need no sglang; and what is not configured is not asked."""
    check(without_sglang, "engine.kind=sim")
    check_interpreters(Config())


def test_real_engines_need_sglang(without_sglang: str) -> None:
    """The error says which version, and what to do."""
    said = refusal(without_sglang)
    assert "needs sglang 0.5.23, which is not installed" in said
    assert "pip install 'zagent[sglang]'" in said


def test_one_that_is_not_there(tmp_path: Path) -> None:
    """Nor is a directory, or a file without the right, an interpreter."""
    assert "cannot be run: No such file or directory" in refusal(str(tmp_path / "none"))
    assert "cannot be run: Permission denied" in refusal(str(tmp_path))


def test_one_without_zagent(tmp_path: Path) -> None:
    """Which version is to be installed, and what its own interpreter said; the launcher's PYTHONPATH is no help."""
    bare = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
    said = refusal(bare)
    assert f"cannot import zagent, of which it needs {__version__}" in said
    assert "No module named 'zagent'" in said
    mute = script(tmp_path / "mute", "exit 3")
    assert "it exited with code 3" in refusal(mute)


def test_one_with_another_zagent(tmp_path: Path) -> None:
    """Both versions and both interpreters are named. (What it prints beside its answer does not matter.)"""
    other = script(tmp_path / "python", "echo a banner", 'echo \'["9.9.9", ""]\'')
    said = refusal(other)
    for part in (other, "9.9.9", sys.executable, __version__):
        assert part in said


def test_one_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for for ever."""
    monkeypatch.setattr(interpreter, "ANSWER_S", 0.2)
    assert "did not answer within 0.2 s" in refusal(script(tmp_path / "python", "exec sleep 60"))


def test_each_is_asked_once(tmp_path: Path) -> None:
    """Services with a model run under the policy's, unless they name their own; a wrong one is the service's error."""
    answer = f'echo \'["{__version__}", ""]\''
    first, second = (script(tmp_path / n, f"echo {n} >> {tmp_path}/asked", answer) for n in ("first", "second"))
    judges = ("services.judge.model.path=tiny", "services.other.model.path=tiny")
    check(first, *judges, f"services.other.engine.python={second}")
    assert (tmp_path / "asked").read_text() == "first\nsecond\n"
    with pytest.raises(ConfigError, match=r"^services\.other\.engine\.python=/nowhere/python cannot be run"):
        check(first, *judges, "services.other.engine.python=/nowhere/python")


def test_relative_paths_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not followed: an environment's interpreter is a link out of it."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert EngineConfig(python="env/python").python == str(tmp_path / "env" / "python")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineConfig(python="~/env/python").python == str(tmp_path / "env" / "python")


def test_a_services_engines_follow_the_policys() -> None:
    """Unless they have their own."""
    policy, own = EngineConfig(python="/a/python"), EngineConfig(python="/b/python")
    assert [python_of(policy), python_of(EngineConfig(), policy), python_of(own, policy)] == [
        *("/a/python", "/a/python", "/b/python")
    ]
    assert python_of(EngineConfig()) == python_of(EngineConfig(), EngineConfig()) == ""


def test_its_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variables without those that lead to our modules, its programs first; what a service sets comes last."""
    monkeypatch.setenv("PYTHONPATH", "/trainer/modules")
    monkeypatch.setenv("PYTHONHOME", "/trainer")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("HF_HOME", "/models")
    made = environment_of("/engine/bin/python", {"PYTHONPATH": "/its/own"})
    assert (made["PATH"], made["HF_HOME"], made["PYTHONPATH"]) == ("/engine/bin:/usr/bin", "/models", "/its/own")
    assert "PYTHONHOME" not in made
