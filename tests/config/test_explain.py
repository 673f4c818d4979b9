"""What is said about a wrong configuration: one line, the key, the value, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from zagent.config import Config
from zagent.errors import ConfigError


def refused(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.count=", "engine.count=None: should be a valid integer or should be 'auto'"),
        ("worker=5", "worker=5: must be a section (worker.NAME=…)"),
        ("rollout.imports=mine", "rollout.imports='mine': must be a list: rollout.imports=[mine]"),
        ("engine.gpus=0", "engine.gpus=0: must be a list: engine.gpus=[0]"),
        ("engine.args=3", "engine.args=3: must be a map"),
        ("rollout.temperature=.inf", "rollout.temperature=inf: must be a finite number"),
        ("rollout.temperature=nan", "rollout.temperature='nan': must be a finite number"),
        ("launcher.start_timeout_s=.inf", "launcher.start_timeout_s=inf: must be a finite number"),
        ("model.path=???", "model.path=??? must be given"),
        ("model.path=${nowhere}", "model.path: Interpolation key 'nowhere' not found"),
        (
            "engine.count=[1",
            "override 'engine.count=[1': not YAML: expected ',' or ']', but got '<stream end>' in line 1",
        ),
    ],
)
def test_a_wrong_override_is_one_line(override: str, message: str) -> None:
    """Neither pydantic's nor OmegaConf's nor YAML's own report."""
    assert refused(override) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"engine: [1,\nfoo: :", "not YAML: expected the node content, but found ':' in line 2"),
        (b"- a\n- b\n", "must be a mapping of sections"),
        (bytes(range(256)), "can't decode byte 0x80"),
    ],
    ids=["broken", "a list", "no text"],
)
def test_a_broken_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    """With the line, where YAML says it."""
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    said = refused(path=path)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said
