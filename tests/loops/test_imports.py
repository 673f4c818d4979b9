"""An import that fails is told by the user's own lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from zagent.errors import ConfigError, UnknownAgent
from zagent.loops.imports import find_object, import_listed
from zagent.loops.registry import find_loop, register_file


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `freshly_broken`, importable."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "freshly_broken.py"


def said(name: str = "freshly_broken") -> str:
    with pytest.raises(ConfigError) as caught:
        import_listed(name)
    return str(caught.value)


def test_a_missing_module_is_one_line() -> None:
    """There is no code of the user's to show."""
    assert said("no_such_module") == (
        "rollout.imports: 'no_such_module' cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_failing_module_shows_its_frames_only(module: Path) -> None:
    """Neither importlib's nor ours."""
    module.write_text("def f():\n    raise RuntimeError('cheese')\n\nf()\n")
    text = said()
    assert text.startswith("rollout.imports: 'freshly_broken' cannot be imported: RuntimeError: cheese\nTraceback")
    assert "line 4, in <module>" in text
    assert "line 2, in f" in text
    assert text.count("File ") == 2


def test_a_syntax_error_shows_the_line(module: Path) -> None:
    """Python's own marks."""
    module.write_text("def f(:\n")
    assert "freshly_broken.py" in said()
    assert "def f(:" in said()


def test_a_module_that_exits_does_not_end_the_process(module: Path) -> None:
    """It is as broken as one that raises."""
    module.write_text("import sys\nsys.exit('bye')\n")
    assert "SystemExit: bye" in said()


def test_a_dotted_path_is_told_without_hydras_wrapping(module: Path) -> None:
    """The user's own error and frame, as for `rollout.imports`."""
    module.write_text("raise RuntimeError('cheese')\n")
    with pytest.raises(UnknownAgent, match="cannot be imported: RuntimeError: cheese\nTraceback") as caught:
        find_loop("freshly_broken.Agent")
    assert "hydra" not in str(caught.value)


def test_a_loop_file_names_the_entry_whose_target_is_broken(tmp_path: Path) -> None:
    """File, number and name."""
    path = tmp_path / "loops.yaml"
    path.write_text("- {name: mine, _target_: no.such.Thing}\n")
    with pytest.raises(ConfigError, match=r"loops.yaml: entry 0 \('mine'\): ModuleNotFoundError: No module named 'no'"):
        register_file(path)


def test_a_name_that_a_module_lacks_is_told_as_such() -> None:
    """Not as a package that the module is not."""
    with pytest.raises(
        ConfigError, match=r"reward.function='string.nothing' cannot be imported: module 'string' has no"
    ):
        find_object("reward.function", "string.nothing")
