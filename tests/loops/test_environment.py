"""`env_agent`: gyms and games as the other speaker."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import zagent
from support.scripted_llm import ScriptedLLM
from zagent.config import MultiTurnConfig, RolloutConfig
from zagent.errors import DeadlineExceeded, InputError, LoopError
from zagent.loops.base import TrainerConfig
from zagent.loops.environment import EnvAgentLoop, find_env, with_observation
from zagent.tiny.tokenizer import build
from zagent.types import AgentLoopOutput

TOKENIZER = build()
PROMPT = [{"role": "user", "content": "Reach zero."}]
MADE: list[Countdown] = []


@zagent.register_env("countdown")
class Countdown:
    """Subtract until nothing is left."""

    def __init__(self, start: int = 3, **odd: Any) -> None:
        self.left, self.odd = start, odd
        self.closed = 0
        self.threads: set[str] = set()
        self.reset_with: dict[str, Any] = {}
        MADE.append(self)

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        self.reset_with = options
        return f"{self.left} left", {}

    def step(self, action: str) -> Any:
        self.threads.add(threading.current_thread().name)
        if "step" in self.odd:
            return self.odd["step"]
        self.left -= int(action)
        return f"{self.left} left", float(action), self.left <= 0, False, self.odd.get("info", {})

    def close(self) -> None:
        self.closed += 1
        if bad := self.odd.get("bad_close"):
            raise RuntimeError("stuck") if bad is True else bad


class Slow:
    """Never answers."""

    closed = False

    async def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def step(self, action: str) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        Slow.closed = True


def loop_on(llm: ScriptedLLM, response_length: int = 500, **limits: Any) -> EnvAgentLoop:
    rollout = RolloutConfig(response_length=response_length, multi_turn=MultiTurnConfig(**limits))
    return EnvAgentLoop(TrainerConfig(rollout), llm, TOKENIZER)  # type: ignore[arg-type]


def play(
    *answers: str, response_length: int = 500, limits: dict[str, Any] | None = None, **row: Any
) -> tuple[AgentLoopOutput, ScriptedLLM, Countdown]:
    llm = ScriptedLLM(TOKENIZER, *answers)
    loop = loop_on(llm, response_length, **(limits or {}))
    output = asyncio.run(loop.run({}, raw_prompt=PROMPT, **{"env": "countdown", **row}))
    return output, llm, MADE[-1]


def test_actions_and_observations_alternate_until_the_end() -> None:
    """Rewards per step, their sum as the score, the environment closed once."""
    output, llm, env = play("1", "2")
    said = [message["content"] for message in output.extra_fields["messages"]]
    assert said == ["Reach zero.\n\n3 left", "1", "2 left", "2"]
    assert output.extra_fields["turn_scores"] == [1.0, 2.0]
    assert output.reward_score == 3.0
    assert output.num_turns == 4
    assert env.closed == 1
    mask = np.asarray(output.response_mask) == 1
    assert list(np.asarray(output.response_ids)[mask]) == llm.sampled
    ids = [*output.prompt_ids, *output.response_ids]
    rendered = TOKENIZER.apply_chat_template(output.extra_fields["messages"], tokenize=True, return_dict=False)
    assert rendered[: len(ids)] == ids


def test_each_row_has_an_environment_of_its_own() -> None:
    """Made from its `env_kwargs`, reset with its seed and options."""
    _, _, first = play("9", env_kwargs={"start": 9}, env_seed=4, env_options={"hard": True})
    _, _, second = play("3")
    assert first is not second
    assert first.reset_with == {"seed": 4, "options": {"hard": True}}


def test_plain_methods_run_in_a_thread() -> None:
    """A gym that computes does not hold up the other trajectories."""
    _, _, env = play("3")
    assert threading.main_thread().name not in env.threads


def test_a_score_in_the_last_info_wins() -> None:
    """Over the sum of the rewards."""
    output, _, _ = play("3", env_kwargs={"info": {"score": 0.5, "won": True}})
    assert output.reward_score == 0.5
    assert output.extra_fields["env_info"] == {"score": 0.5, "won": True}


def test_limits_end_the_game() -> None:
    """As in `tool_agent`; the last action is still scored."""
    output, llm, env = play("1", "1", env_kwargs={"start": 10}, limits={"max_assistant_turns": 2})
    assert len(llm.asked) == 2
    assert output.extra_fields["turn_scores"] == [1.0, 1.0]
    assert env.closed == 1
    output, llm, _ = play("1", response_length=5, env_kwargs={"start": 10})
    assert list(output.response_mask) == [1, 1]


STEPS = [
    *("text", ("text", 1.0), (3, 1.0, True, False, {}), ("text", "x", True, False, {})),
    *(("text", reward, True, False, {}) for reward in (float("nan"), float("inf"), 10**400)),
]


@pytest.mark.parametrize("given", STEPS, ids=lambda given: repr(given)[:40])
def test_a_step_of_another_form_fails_the_row(given: Any) -> None:
    """Named, and the environment is closed; a reward that is not finite would spoil the training."""
    with pytest.raises(LoopError, match="step must give"):
        play("1", env_kwargs={"step": given})
    assert MADE[-1].closed == 1


def test_an_error_of_the_environment_is_the_rows() -> None:
    """With its own class; a close that fails hides nothing."""
    with pytest.raises(ValueError, match="invalid literal"):
        play("one", env_kwargs={"bad_close": True})
    assert MADE[-1].closed == 1


def test_an_environment_that_hangs_is_given_up() -> None:
    """After `multi_turn.tool_timeout`, and closed."""
    llm = ScriptedLLM(TOKENIZER, "1")
    loop = loop_on(llm, tool_timeout=0.05)
    with pytest.raises(DeadlineExceeded, match=r"Slow.*took longer than 0.05 s"):
        asyncio.run(loop.run({}, raw_prompt=PROMPT, env=f"{__name__}.Slow"))
    assert Slow.closed


def test_a_lone_surrogate_is_a_question_mark() -> None:
    """No tokenizer takes one."""
    output, _, _ = play("1", "1", env_kwargs={"step": ("a\ud800", 1.0, False, False, {})}, limits={"max_user_turns": 1})
    assert [m["content"] for m in output.extra_fields["messages"]][-2] == "a?"


def test_a_close_that_exits_hides_nothing() -> None:
    """As one that raises."""
    output, _, env = play("3", env_kwargs={"bad_close": SystemExit(1)})
    assert (output.reward_score, env.closed) == (3.0, 1)


@pytest.mark.parametrize("name", [None, "nowhere", 7, ["countdown"]])
def test_an_unknown_environment_lists_the_known(name: Any) -> None:
    """By registered name or dotted path."""
    with pytest.raises(InputError, match="countdown"):
        find_env(name)


def test_a_path_that_cannot_be_imported_says_why() -> None:
    """Not Hydra's own error."""
    with pytest.raises(InputError, match="no_such_module"):
        find_env("no_such_module.Env")
    with pytest.raises(InputError, match="neither class nor function"):
        find_env(f"{__name__}.PROMPT")


def test_the_first_observation_joins_the_users_message() -> None:
    """Templates demand alternating roles; without text there is nothing to join."""
    system = [{"role": "system", "content": "s"}]
    assert with_observation(PROMPT, "") == PROMPT
    assert with_observation(PROMPT, "o") == [{"role": "user", "content": "Reach zero.\n\no"}]
    assert with_observation(system, "o") == [*system, {"role": "user", "content": "o"}]
    assert PROMPT == [{"role": "user", "content": "Reach zero."}]
