"""Loops written for verl, where verl is not installed. (Where it is: tests/adapters/real.)"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.scripted_llm import ScriptedLLM
from support.tiny_tokenizer import tiny_tokenizer
from zagent.config import MultiTurnConfig, RolloutConfig
from zagent.errors import LoopError
from zagent.loops import registry
from zagent.loops.base import TrainerConfig
from zagent.loops.tokens import ChatTemplate
from zagent.models import PACKAGED
from zagent.types import AgentLoopOutput, TokenOutput

TOKENIZER = tiny_tokenizer()
ASKED = [{"role": "user", "content": "hi"}]
MODEL = str(PACKAGED["tiny"])
HERE = Path(__file__).parent


def verls() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] in ("verl", "verl_style")}


@pytest.fixture(autouse=True)
def a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module listed in `rollout.imports`, then theirs; nothing of it remains."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_ADOPTED", {})
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("zagent.adapters.verl.loops", None)
    importlib.import_module("zagent.adapters.verl.loops")
    importlib.import_module("verl_style")
    yield
    for name in verls():
        del sys.modules[name]


def run(name: str, llm: Any, params: dict[str, Any] | None = None, **row: Any) -> AgentLoopOutput:
    rollout = RolloutConfig(prompt_length=64, response_length=96, multi_turn=MultiTurnConfig(format="pythonic"))
    keywords = {
        "trainer_config": TrainerConfig(rollout, 4096, MODEL),
        "server_manager": llm,
        "tokenizer": TOKENIZER,
        "processor": None,
        "dataset_cls": None,
        "data_config": None,
    }

    async def main() -> Any:
        return await registry.build_loop(name, keywords).run({} if params is None else params, raw_prompt=ASKED, **row)

    output = asyncio.run(main())
    assert isinstance(output, AgentLoopOutput)
    return output


def test_a_registered_loop_runs_unchanged() -> None:
    """Its tokens are those of the conversation, sampled ones with mask 1 and the engine's log-probabilities, its own
    fields are kept, and both calls are of one session."""
    llm = ScriptedLLM(TOKENIZER, "one", "two")
    output = run("two_turns", llm, {"logprobs": True}, reply="more")
    template = ChatTemplate(TOKENIZER)
    prompt = template.prompt(ASKED)
    one, two = ([*TOKENIZER.encode(text), TOKENIZER.eos_token_id] for text in ("one", "two"))
    inserted = template.continuation(one, [{"role": "user", "content": "more"}])
    assert list(output.prompt_ids) == prompt
    assert list(output.response_ids) == [*one, *inserted, *two]
    assert list(output.response_mask) == [1] * len(one) + [0] * len(inserted) + [1] * len(two)
    sampled = np.array(output.response_logprobs)[np.array(output.response_mask) == 1]
    assert sampled.tolist() == [-float(i) for i in range(1, len(one) + len(two) + 1)]
    assert output.num_turns == 4
    assert output.metrics.generate_sequences >= 0
    assert output.extra_fields == {"min_global_steps": 2, "max_global_steps": 2, "model": MODEL}
    assert len({asked.session for asked in llm.asked}) == 1


def test_a_dotted_path_and_an_entry_of_the_file_work(tmp_path: Path) -> None:
    """With the arguments of the entry; configuration as attributes and by `get`."""
    assert run("verl_style.Early", ScriptedLLM(TOKENIZER, "yes…")).extra_fields["said"] == "yes"
    file = tmp_path / "loops.yaml"
    file.write_text("- name: early\n  _target_: verl_style.Early\n  suffix: '!'\n")
    registry.register_file(file)
    output = run("early", ScriptedLLM(TOKENIZER, "yes…"))
    assert output.extra_fields["said"] == "yes!"
    assert (output.extra_fields["format"], output.extra_fields["longest"]) == ("pythonic", 96)


@pytest.mark.parametrize(
    ("params", "sent"),
    [({}, 96), ({"max_tokens": 5}, 5), ({"max_new_tokens": 7}, 7), ({"max_tokens": 5, "max_new_tokens": 7}, 7)],
)
def test_calls_are_limited_as_verls(params: dict[str, Any], sent: int) -> None:
    """By `response_length`, unless the loop says how many."""
    llm = ScriptedLLM(TOKENIZER, "yes")
    run("verl_style.Early", llm, params)
    given = llm.asked[0].given
    assert given.get("max_new_tokens", given.get("max_tokens")) == sent


def test_later_calls_get_what_is_left() -> None:
    """`prompt_length` and `response_length` together; where that is used up no engine is asked."""
    half = TokenOutput(list(range(40)), [-1.0] * 40, "length")
    llm = ScriptedLLM(TOKENIZER, half, half)
    run("two_turns", llm, {"logprobs": True}, reply="more")
    second = llm.asked[1]
    assert second.given["max_tokens"] == 64 + 96 - len(second.seen)
    llm = ScriptedLLM(TOKENIZER, half)
    output = run("two_turns", llm, {"logprobs": True}, reply="m" * 96)
    assert len(llm.asked) == 1
    assert sum(output.response_mask) == 40


def test_stop_reasons_are_verls() -> None:
    """Which call an aborted answer so."""
    for ours, theirs in (("stop", "completed"), ("length", "completed"), ("abort", "aborted")):
        output = run("verl_style.Early", ScriptedLLM(TOKENIZER, TokenOutput([1], [-1.0], ours)))  # type: ignore[arg-type]
        assert output.extra_fields["stop"] == theirs


def test_images_are_refused() -> None:
    """In the messages, in a call, in the output: not dropped."""
    from zagent.adapters.verl import loops

    client = loops.Client(ScriptedLLM(TOKENIZER), loops.verl_config(TrainerConfig(RolloutConfig()))[0])  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="see no images"):
        asyncio.run(client.generate("s", prompt_ids=[1], sampling_params={}, image_data=[b"png"]))
    module = sys.modules["verl.experimental.agent_loop.agent_loop"]
    seen = module.AgentLoopOutput(
        prompt_ids=[1], response_ids=[], response_mask=[], metrics={}, multi_modal_data={"images": ["png"]}
    )
    with pytest.raises(LoopError, match="see no images"):
        loops.converted(seen)


def test_what_is_no_output_is_refused() -> None:
    """By name. One of zagent's own is taken as it is."""
    from zagent.adapters.verl.loops import converted

    with pytest.raises(LoopError, match="returned a dict"):
        converted({})
    ours = AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[])
    assert converted(ours) is ours


def test_zagents_own_loops_are_built_as_before() -> None:
    """Only those that derive from verl's base class are adopted."""
    from zagent.loops.single_turn import SingleTurnAgentLoop

    config = TrainerConfig(RolloutConfig())
    loop = registry.build_loop("single_turn_agent", {"trainer_config": config, "server_manager": None, "tokenizer": 1})
    assert type(loop) is SingleTurnAgentLoop


def test_other_parts_of_verl_are_missing_by_name() -> None:
    """A loop that needs more of verl says what."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.utils\.dataset'"):
        importlib.import_module("verl.utils.dataset")
    with pytest.raises(ImportError, match="cannot import name 'AgentLoopWorker'"):
        exec("from verl.experimental.agent_loop import AgentLoopWorker")
