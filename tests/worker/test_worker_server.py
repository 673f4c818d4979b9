"""What a worker prepares before it serves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_tokenizer import saved_tokenizer
from zagent.client.process import contained
from zagent.config import ModelConfig, RolloutConfig
from zagent.errors import ConfigError, LoopError, UnknownAgent
from zagent.loops import registry
from zagent.loops.tokenizer import probe
from zagent.worker.server import prepare


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered here are forgotten afterwards."""
    registry.find_loop("single_turn_agent")  # registers itself once per process, when it is imported
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def settings(
    directory: Path, tokenizer: str | None = None, sections: dict[str, Any] | None = None, **rollout: Any
) -> dict[str, Any]:
    path = saved_tokenizer(directory / "model")
    model = ModelConfig(path=path if tokenizer is None else str(directory), tokenizer_path=tokenizer and path)
    return {
        "model": model.model_dump(mode="json"),
        "rollout": RolloutConfig(**rollout).model_dump(mode="json"),
        "context_length": 512,
        "name": "worker-1",
        **(sections or {}),
    }


def test_the_models_own_tokenizer_is_loaded(tmp_path: Path) -> None:
    """And the configuration that loops see."""
    made = prepare(settings(tmp_path, temperature=0.5))
    tokenizer, config = made.tokenizer, made.trainer_config
    assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
    assert (config.context_length, config.rollout.temperature) == (512, 0.5)


def test_another_tokenizer_may_be_named(tmp_path: Path) -> None:
    """`model.tokenizer_path` wins over the model's."""
    made = prepare(settings(tmp_path, tokenizer="beside"))
    assert len(probe(made.tokenizer)) == 16


def test_the_probe_tells_tokenizers_apart(tmp_path: Path) -> None:
    """Equal for equal ones, different where ids or the chat template differ."""
    first = prepare(settings(tmp_path / "a")).tokenizer
    second = prepare(settings(tmp_path / "b")).tokenizer
    assert probe(first) == probe(second)
    second.chat_template = "{{ messages }}"
    assert probe(first) != probe(second)


def test_user_modules_are_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their `@register` works in every worker, and the default agent may be one of them."""
    (tmp_path / "my_loops.py").write_text("import zagent\n@zagent.register('mine')\nclass Mine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepare(settings(tmp_path, imports=["my_loops"], agent="mine"))
    assert registry.find_loop("mine").__name__ == "Mine"
    sys.modules.pop("my_loops")


def test_a_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ConfigError`, with the module's name and its own error."""
    (tmp_path / "broken_loops.py").write_text("raise RuntimeError('made of cheese')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)broken_loops.*made of cheese"):
        prepare(settings(tmp_path, imports=["broken_loops"]))


def test_an_unknown_default_agent_ends_the_start() -> None:
    """Before any model or tokenizer is looked at."""
    with pytest.raises(UnknownAgent, match="nobody"):
        prepare({"model": {}, "rollout": {"agent": "nobody"}})


def test_a_broken_loop_file_ends_the_start(tmp_path: Path) -> None:
    """As `ConfigError`."""
    path = tmp_path / "loops.yaml"
    path.write_text("- [")
    with pytest.raises(ConfigError, match=r"loops\.yaml"):
        prepare({"model": {}, "rollout": {"agent_loop_config_path": str(path)}})


def test_nothing_more_is_made_than_is_asked_for(tmp_path: Path) -> None:
    """No reward, no tracer, no interaction by default."""
    made = prepare(settings(tmp_path))
    assert (made.reward, made.tracing, dict(made.interactions)) == (None, None, {})


def test_reward_and_tracer_are_found(tmp_path: Path) -> None:
    """By their paths; the tracer knows whose it is."""
    trace = {"target": "zagent.worker.trace.JsonlTracer", "args": {"path": str(tmp_path / "{worker}.jsonl")}}
    made = prepare(settings(tmp_path, sections={"reward": {"function": "support.rewards.length"}, "trace": trace}))
    assert made.reward is not None
    assert made.tracing is not None
    assert (tmp_path / "worker-1.jsonl").exists()
    asyncio.run(made.tracing.close())


@pytest.mark.parametrize(
    ("sections", "rollout", "why"),
    [
        ({"reward": {"function": "support.rewards.lenght"}}, {}, "reward.function='support.rewards.lenght'"),
        ({"trace": {"target": "no_such.Tracer"}}, {}, "trace.target='no_such.Tracer'"),
        (
            {},
            {"multi_turn": {"format": "hermse"}},
            "rollout.multi_turn.format='hermse': no such parser; known: .*hermes",
        ),
        ({}, {"multi_turn": {"tools": ["no_such_tool"]}}, "'no_such_tool' is no tool"),
        ({}, {"multi_turn": {"interaction_config_path": "/no/such.yaml"}}, "interaction_config_path='/no/such.yaml'"),
    ],
)
def test_names_that_mean_nothing_end_the_start(
    sections: dict[str, Any], rollout: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """As `ConfigError` with key, value and reason."""
    with pytest.raises(ConfigError, match=why):
        prepare(settings(tmp_path, sections=sections, **rollout))


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_exits_ends_itself_only(end: BaseException) -> None:
    """In a task of one row's loop it is an error like others; asyncio alone would end the worker's event loop."""

    async def exits() -> None:
        raise end

    async def main() -> BaseException | None:
        asyncio.get_running_loop().set_task_factory(contained(LoopError, "a task of an agent loop"))
        task = asyncio.create_task(exits())
        await asyncio.wait([task])
        unstarted = asyncio.create_task(exits())
        unstarted.cancel()
        await asyncio.wait([unstarted])
        return task.exception()

    assert isinstance(asyncio.run(main()), LoopError)
