"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.clusters import model_directory

README = Path(__file__).parents[2] / "README.md"
EMBEDDING, TRAINING, TOOLS, LOOP = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

RUN_TRAINING = (
    """
import zagent
from transformers import AutoModelForCausalLM


def rows(count):
    return zagent.DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "Hello"}]] * count})


def train(batch):
    trained.append(len(batch))


trained = []
if __name__ == "__main__":
    config = zagent.Config.load(overrides=[
        "engine.kind=sim", "engine.count=2", "worker.count=1", "rollout.response_length=16", "rollout.n=2",
    ])
    with zagent.AgentLoopManager.launch(config) as manager:
        model = AutoModelForCausalLM.from_pretrained(manager.config.model.path)
        batches, prompts = [rows(4), rows(5), rows(6)], [rows(1)] * 128
"""
    + textwrap.indent(TRAINING, " " * 8)
    + """
        print(trained, manager.version)
"""
)

RUN_LOOP = """
import zagent
if __name__ == "__main__":
    config = zagent.Config.load(overrides=[
        "engine.kind=sim", "engine.count=2", "rollout.imports=[my_loops]", "rollout.agent=twice",
    ])
    batch = zagent.DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "Hello"}]] * 3})
    with zagent.AgentLoopManager.launch(config) as manager:
        out = manager.generate_sequences(batch)
        print(out.batch["response_mask"].sum(dim=1).tolist(), out.non_tensor_batch["__num_turns__"].tolist())
"""

RUN_TOOLS = """
import zagent
if __name__ == "__main__":
    config = zagent.Config.load(overrides=[
        "engine.kind=sim", "engine.count=1", "worker.count=1", "rollout.imports=[my_tools]",
        "rollout.agent=tool_agent", "rollout.response_length=32", "reward.function=my_tools.score",
    ])
    columns = {"raw_prompt": [[{"role": "user", "content": "Hello"}]] * 3, "reward_model": [{"ground_truth": "no"}] * 3}
    with zagent.AgentLoopManager.launch(config) as manager:
        out = manager.generate_sequences(zagent.DataProto(non_tensor_batch=columns))
        print(out.non_tensor_batch["reward_score"].tolist(), out.non_tensor_batch["turns"].tolist())
    from my_tools import calculator
    print(calculator("12 + 7"))
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user would be, with a model that needs no download, and a home of its own."""
    model = model_directory(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ZAGENT_README_MODEL", model)
    return tmp_path


def script(directory: Path, code: str) -> str:
    """Runs ``code`` with the tiny model in place of the default one; what it printed."""
    replaced = code.replace("overrides=[", f'overrides=["model.path={os.environ["ZAGENT_README_MODEL"]}", ', 1)
    (directory / "trainer.py").write_text(replaced)
    done = subprocess.run(
        [sys.executable, "trainer.py"], cwd=directory, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_embedding_block(directory: Path) -> None:
    """The dozen lines of embedding code print the shape and type they promise."""
    assert script(directory, EMBEDDING) == "torch.Size([8, 64]) torch.float32\n"


def test_training_block(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches one step off, with two updates between them; then 128 groups of two samples in batches of sixteen,
    with an update after each four."""
    monkeypatch.setenv("ZAGENT_README_MODEL", "tiny")  # which has weights
    assert script(directory, RUN_TRAINING) == f"{[4, 5, 6] + [32] * 8} 4\n"


def test_loop_block(directory: Path) -> None:
    """The loop of one's own runs in the workers: two turns of sixteen sampled tokens each."""
    (directory / "my_loops.py").write_text(LOOP)
    assert script(directory, RUN_LOOP) == "[32, 32, 32] [3, 3, 3]\n"


def test_tools_block(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tool is shown to the model and can be called, its reward function scores each row."""
    monkeypatch.setenv("ZAGENT_README_MODEL", "tiny")  # whose template takes tools
    (directory / "my_tools.py").write_text(TOOLS)
    assert script(directory, RUN_TOOLS) == "[0.0, 0.0, 0.0] [2, 2, 2]\n19\n"


def test_nothing_is_left_to_fill_in() -> None:
    """No placeholder in capitals with an underscore stands outside code."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", README.read_text(), flags=re.DOTALL)
    assert re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b", prose) == []


def test_files_named_exist() -> None:
    """Every file that the README links to is there."""
    prose = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("http") and not (README.parent / link).exists()] == []
