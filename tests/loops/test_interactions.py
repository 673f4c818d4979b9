"""Interactions: a simulated user beside the tools."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from support.scripted_llm import ScriptedLLM
from zagent.config import MultiTurnConfig, RolloutConfig
from zagent.errors import ConfigError, DeadlineExceeded, InputError, LoopError
from zagent.loops.base import TrainerConfig
from zagent.loops.interactions import BaseInteraction, choose, load_interactions
from zagent.loops.tool import ToolAgentLoop
from zagent.tiny.tokenizer import build
from zagent.types import AgentLoopOutput

TOKENIZER = build()
PROMPT = [{"role": "user", "content": "Guess my number."}]


class Guess(BaseInteraction):
    """Says higher or lower until the number is found."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.finalized: list[str] = []
        self.seen: list[list[str]] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.started.append((instance_id, kwargs))
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        self.seen.append([message["role"] for message in messages])
        guess, number = int(messages[-1]["content"]), kwargs["number"]
        if guess == number:
            return True, "Right!", 1.0, {}
        return False, "higher" if guess < number else "lower", -0.1, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        score: float | None = self.config.get("score")
        return score

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.finalized.append(instance_id)
        if self.config.get("bad_end"):
            raise RuntimeError("cannot let go")


def play(
    interaction: BaseInteraction,
    *answers: str,
    row: dict[str, Any] | None = None,
    response_length: int = 500,
    **limits: Any,
) -> tuple[AgentLoopOutput, ScriptedLLM]:
    llm = ScriptedLLM(TOKENIZER, *answers)
    rollout = RolloutConfig(response_length=response_length, multi_turn=MultiTurnConfig(**limits))
    loop = ToolAgentLoop(TrainerConfig(rollout), llm, TOKENIZER)  # type: ignore[arg-type]
    loop.interactions = {interaction.name: interaction}
    columns = row if row is not None else {"extra_info": {"interaction_kwargs": {"name": "guess", "number": 7}}}
    return asyncio.run(loop.run({}, raw_prompt=PROMPT, **columns)), llm


def test_the_user_replies_until_the_conversation_is_over() -> None:
    """Replies are inserted with mask 0; each answer is scored; the last reply is not shown to the model."""
    guess = Guess({"name": "guess"})
    output, llm = play(guess, "5", "9", "7")
    messages = output.extra_fields["messages"]
    said = [message["content"] for message in messages]
    assert said == ["Guess my number.", "5", "higher", "9", "lower", "7", "Right!"]
    assert output.extra_fields["turn_scores"] == [-0.1, -0.1, 1.0]
    assert output.num_turns == 6
    mask = np.asarray(output.response_mask) == 1
    assert list(np.asarray(output.response_ids)[mask]) == llm.sampled
    ids = [*output.prompt_ids, *output.response_ids]
    assert TOKENIZER.apply_chat_template(messages, tokenize=True, return_dict=False)[: len(ids)] == ids


def test_each_start_is_finalized_once() -> None:
    """Also after an error, and one in finalizing itself is only logged (pitfall E10)."""
    guess = Guess({"name": "guess", "bad_end": True})
    output, _ = play(guess, "7")
    assert output.extra_fields["turn_scores"] == [1.0]
    with pytest.raises(ValueError, match="nonsense"):
        play(guess, "nonsense")
    assert [started for started, _ in guess.started] == guess.finalized
    assert len(set(guess.finalized)) == 2


def test_the_rows_kwargs_reach_the_interaction() -> None:
    """All but its name, to start, replies and score."""
    guess = Guess({"name": "guess"})
    play(guess, "7")
    assert guess.started[0][1] == {"number": 7}


def test_a_score_of_the_whole_is_the_rows_reward() -> None:
    """None leaves it to the reward function."""
    assert play(Guess({"name": "guess", "score": 0.25}), "7")[0].reward_score == 0.25
    assert play(Guess({"name": "guess"}), "7")[0].reward_score is None


def test_a_reply_that_does_not_fit_ends_the_trajectory() -> None:
    """As with tools: all or nothing, and no call with no budget (pitfall D8)."""
    output, llm = play(Guess({"name": "guess"}), "5", response_length=5)
    assert len(llm.asked) == 1
    assert list(output.response_mask) == [1, 1]
    assert [message["role"] for message in output.extra_fields["messages"]] == ["user", "assistant"]


def test_limits_of_turns_hold_for_replies() -> None:
    """`max_user_turns` counts them."""
    output, llm = play(Guess({"name": "guess"}), "1", "2", "3", max_user_turns=2)
    assert len(llm.asked) == 3
    assert output.num_turns == 6


def test_an_answer_cut_by_the_callers_limit_still_gets_a_reply() -> None:
    """The end of the turn that the model did not write is inserted with mask 0."""
    output, _ = play(Guess({"name": "guess"}), "5…", "7")
    ids = [*output.prompt_ids, *output.response_ids]
    rendered = TOKENIZER.apply_chat_template(output.extra_fields["messages"], tokenize=True, return_dict=False)
    assert rendered[: len(ids)] == ids


def test_a_reply_of_another_form_fails_the_row() -> None:
    """Named."""

    class Odd(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return "just text"

    with pytest.raises(LoopError, match=r"odd.*generate_response must give"):
        play(Odd({"name": "odd"}), "5", row={"interaction_kwargs": {}})


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 10**400, "much"], ids=lambda score: repr(score)[:20])
def test_a_score_that_is_no_finite_number_fails_the_row(score: Any) -> None:
    """It would spoil the training."""

    class Odd(Guess):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return True, "text", score, {}

    with pytest.raises(LoopError, match=r"guess.*generate_response must give"):
        play(Odd({"name": "guess"}), "5")


def test_a_lone_surrogate_is_a_question_mark() -> None:
    """No tokenizer takes one, and no wire."""

    class Odd(Guess):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return True, "a\ud800", 1.0, {}

    assert play(Odd({"name": "guess"}), "5")[0].extra_fields["messages"][-1]["content"] == "a?"


@pytest.mark.parametrize("end", [SystemExit(1), None], ids=["exits", "hangs"])
def test_a_bad_end_is_only_logged(
    end: BaseException | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's outcome is decided, and soon."""
    monkeypatch.setattr("zagent.loops.interactions.RELEASE_TIMEOUT_S", 0.05)

    class Bad(Guess):
        async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
            if end is not None:
                raise end
            await asyncio.Event().wait()

    assert play(Bad({"name": "guess"}), "7")[0].extra_fields["turn_scores"] == [1.0]
    assert "finalize_interaction failed" in caplog.text


def test_the_only_interaction_need_not_be_named() -> None:
    """Of several, one must be; unknown names list the known ones (pitfall E12). A row that asks for none has none."""
    one, two = Guess({"name": "one"}), Guess({"name": "two"})
    assert (
        choose({}, {})
        == choose({"one": one}, {"extra_info": None})
        == choose({"one": one, "two": two}, {})
        == (None, {})
    )
    assert choose({"one": one}, {"interaction_kwargs": {}}) == (one, {})
    assert choose({"one": one}, {"extra_info": {"interaction_kwargs": {"n": 1}}}) == (one, {"n": 1})
    assert choose({"one": one, "two": two}, {"interaction_kwargs": {"name": "two", "number": 3}}) == (
        two,
        {"number": 3},
    )
    for kwargs in ({"interaction_kwargs": {}}, {"interaction_kwargs": {"name": "three"}}):
        with pytest.raises(InputError, match="known: one, two"):
            choose({"one": one, "two": two}, kwargs)
    with pytest.raises(InputError, match="none"):
        choose({}, {"interaction_kwargs": {"name": "three"}})


@pytest.mark.parametrize("extra_info", ["text", [1], 5, {"interaction_kwargs": None}, None])
def test_rows_without_an_interaction_may_have_any_extra_info(extra_info: Any) -> None:
    """It is theirs."""
    assert choose({}, {"extra_info": extra_info}) == (None, {})


@pytest.mark.parametrize("row", [{"interaction_kwargs": "one"}, {"extra_info": {"interaction_kwargs": ["one"]}}])
def test_kwargs_of_another_form_fail_the_row(row: dict[str, Any]) -> None:
    """Named; so is a name that is no text."""
    with pytest.raises(InputError, match="interaction_kwargs must be a map"):
        choose({}, row)
    with pytest.raises(InputError, match="is no interaction"):
        choose({}, {"interaction_kwargs": {"name": ["one"]}})


def test_interactions_come_from_a_file(tmp_path: Path) -> None:
    """By name, or by their class's where none is given."""
    path = tmp_path / "interactions.yaml"
    path.write_text(
        f"interaction:\n- {{name: guess, class_name: {__name__}.Guess, config: {{score: 0.5}}}}\n"
        f"- {{class_name: {__name__}.Guess}}\n"
    )
    found = load_interactions(path)
    assert set(found) == {"guess", "Guess"}
    assert found["guess"].config == {"score": 0.5, "name": "guess"}
    assert load_interactions(None) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("interaction: [{name: x}]", "interaction 0 needs class_name"),
        ("interaction: [{class_name: no.such.Class}]", "no"),
        ("interaction: [{class_name: builtins.dict, name: d}]", "no zagent.BaseInteraction"),
        (
            f"interaction: [{{class_name: {__name__}.Guess}}, {{class_name: {__name__}.Guess}}]",
            "second one of the name",
        ),
        ("interactions: []", "key 'interaction'"),
        ("interaction: 3", "must be a list"),
        ("interaction: &x [*x]", "cannot be read: an entry contains itself"),
    ],
)
def test_a_broken_file_is_a_config_error(tmp_path: Path, text: str, said: str) -> None:
    """It names the key, the file and the entry."""
    path = tmp_path / "interactions.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_interactions(path)
    assert "interaction_config_path" in str(caught.value)
    assert "interactions.yaml" in str(caught.value)


def test_the_base_class_is_public() -> None:
    """Users derive from it."""
    assert zagent.BaseInteraction is BaseInteraction


def test_an_interaction_that_hangs_fails_the_row_in_time() -> None:
    """After `multi_turn.tool_timeout`, by its name, and it is finalized."""

    class Hangs(Guess):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    hangs = Hangs({"name": "guess"})
    with pytest.raises(DeadlineExceeded, match=r"interaction 'guess': generate_response took longer than 0\.05 s"):
        play(hangs, "5", tool_timeout=0.05)
    assert len(hangs.finalized) == 1


def test_plain_methods_run_in_a_thread() -> None:
    """As those of tools and environments."""

    class Plain(Guess):
        def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            assert threading.current_thread() is not threading.main_thread()
            return True, "done", 1.0, {}

    output, _ = play(Plain({"name": "guess"}), "5")
    assert output.extra_fields["turn_scores"] == [1.0]
