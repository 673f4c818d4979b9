"""Reward functions: what they are given, what they may give, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from support.virtual_clock import run
from zagent.config import RewardConfig
from zagent.errors import ConfigError, RewardError
from zagent.loops.threads import Threads
from zagent.types import AgentLoopOutput
from zagent.worker.reward import OFFERED, Finished, Reward, Scored

ROW = {
    "raw_prompt": [{"role": "user", "content": "2+2?"}],
    "data_source": "sums",
    "reward_model": {"ground_truth": ["4"], "style": "rule"},
    "extra_info": {"level": [3], "num_turns": "mine"},
}
INFO = {"step": 5, "sample_index": 7, "rollout_n": 1, "validate": False}


def finished(row: dict[str, Any] | None = None, text: str = "four", attempt: int = 1, **fields: Any) -> Finished:
    fields = {"prompt_ids": [1], "response_ids": [2], "response_mask": [1], "num_turns": 4, **fields}
    output = AgentLoopOutput(**fields)
    return Finished(ROW if row is None else row, INFO, output, text, {"judge": "a judge"}, attempt)


def reward(function: Callable[..., Any], threads: Threads | None = None, **config: Any) -> Reward:
    return Reward(RewardConfig(**{"function": "mine.score", **config}), function, threads)


def scored(function: Callable[..., Any], row: Finished | None = None, **config: Any) -> Scored:
    """By an async function on virtual time, by any other in real time (its thread is no part of a virtual clock)."""
    clock: Any = run if asyncio.iscoroutinefunction(function) else asyncio.run
    return clock(reward(function, **config).score(row or finished()))  # type: ignore[no-any-return]


def given(function: Callable[..., Any], row: Finished | None = None, **config: Any) -> dict[str, Any]:
    """The keywords that ``function``, which returns its own arguments, was called with."""
    seen: list[dict[str, Any]] = []

    def call(*args: Any, **kwargs: Any) -> float:
        seen.append(function(*args, **kwargs))
        return 0.0

    call.__wrapped__ = function  # type: ignore[attr-defined]  # its signature
    result = scored(call, row, **config)
    assert result.error is None, result.error
    return seen[0]


def failure(function: Callable[..., Any], row: Finished | None = None, **config: Any) -> str:
    result = scored(function, row, **config)
    assert (result.score, type(result.error)) == (None, RewardError)
    return str(result.error)


def verls(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    return locals()


# ---- what it is given -----------------------------------------------------------------------------------------------


def test_verls_four_keywords() -> None:
    """The row's source and truth, the response's text; the loop's fields and verl's two over the row's extra_info."""
    seen = given(verls, finished(extra_fields={"tool_rewards": [0.5], "level": 9}))
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == ("sums", "four", ["4"])
    assert seen["extra_info"] == {"level": 9, "tool_rewards": [0.5], "num_turns": 4, "rollout_reward_scores": {}}


def test_the_rows_own_reward_scores_are_handed_on() -> None:
    """As `rollout_reward_scores`."""
    seen = given(verls, finished({**ROW, "reward_scores": {"tool": 1.0}, "extra_info": None}))
    assert seen["extra_info"] == {"num_turns": 4, "rollout_reward_scores": {"tool": 1.0}}


def test_a_function_may_take_fewer() -> None:
    """Only what it has parameters for."""
    assert given(lambda solution_str: dict(locals())) == {"solution_str": "four"}


def test_more_is_there_for_functions_that_name_it() -> None:
    """The conversation, who the row is, the output, the services, the attempt."""

    def function(messages: Any, trajectory: Any, output: Any, services: Any, attempt: int) -> dict[str, Any]:
        return dict(locals())

    seen = given(function, finished(attempt=3))
    assert seen["messages"] == [*ROW["raw_prompt"], {"role": "assistant", "content": "four"}]
    assert seen["trajectory"] == INFO
    assert seen["output"].response_ids == [2]
    assert seen["services"] == {"judge": "a judge"}
    assert seen["attempt"] == 3


def test_messages_are_the_loops_own_where_it_gives_them() -> None:
    """Tool calls and all."""
    seen = given(lambda messages: dict(locals()), finished(extra_fields={"messages": [{"role": "tool"}]}))
    assert seen["messages"] == [{"role": "tool"}]


def test_keyword_arguments_take_everything() -> None:
    """`**kwargs` gets all that is offered, and `reward.kwargs`."""

    def function(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    assert set(given(function, kwargs={"weight": 2})) == {*OFFERED, "weight"}


def test_reward_kwargs_are_given_too() -> None:
    """By name."""

    def function(solution_str: str, weight: int) -> dict[str, Any]:
        return dict(locals())

    assert given(function, kwargs={"weight": 2})["weight"] == 2


def test_what_it_changes_is_its_own() -> None:
    """The row and the output stay as they are."""

    def function(ground_truth: Any, extra_info: Any, messages: Any, output: Any) -> float:
        ground_truth.append("5")
        extra_info["level"].append(4)
        extra_info["scores"].append(1)
        messages[0]["content"] = "?"
        output.reward_score = 3.0
        return 1.0

    row = finished(extra_fields={"scores": [0]})
    assert scored(function, row).score == 1.0
    assert ROW["reward_model"] == {"ground_truth": ["4"], "style": "rule"}
    assert ROW["extra_info"] == {"level": [3], "num_turns": "mine"}
    assert ROW["raw_prompt"] == [{"role": "user", "content": "2+2?"}]
    assert (row.output.extra_fields, row.output.reward_score) == ({"scores": [0]}, None)


@pytest.mark.parametrize("column", [None, {}, {"style": "rule"}, "4"])
def test_a_row_without_a_truth_uses_the_default(column: Any) -> None:
    """Where the function has one; no data_source is None."""

    def function(data_source: Any, ground_truth: Any = "none") -> dict[str, Any]:
        return dict(locals())

    row = finished({"raw_prompt": [], "reward_model": column})
    assert given(function, row) == {"data_source": None, "ground_truth": "none"}


def test_a_row_without_a_truth_cannot_be_scored_by_a_function_that_needs_it() -> None:
    """The column is named, and what is in it; a truth that is None is one."""
    said = failure(verls, finished({"raw_prompt": [], "reward_model": {"style": "rule"}}))
    assert said == (
        "reward function 'mine.score' needs reward_model['ground_truth'], and the row's reward_model is "
        "{'style': 'rule'}; the answer was 'four'"
    )
    assert given(verls, finished({"raw_prompt": [], "reward_model": {"ground_truth": None}}))["ground_truth"] is None


# ---- what it may give -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array(2), 2.0),
     (Fraction(1, 4), 0.25)],
)  # fmt: skip
def test_numbers_are_scores(value: Any, score: float) -> None:
    """As plain floats, without infos."""
    result = scored(lambda: value)
    assert result == Scored(score)
    assert type(result.score) is float


def test_a_dict_has_the_score_and_infos() -> None:
    """The other keys are infos."""
    assert scored(lambda: {"score": 1, "acc": True, "why": "ok"}) == Scored(1.0, {"acc": True, "why": "ok"})


async def later(solution_str: str) -> float:
    await asyncio.sleep(30)
    return len(solution_str) / 4


class Scorer:
    async def __call__(self, solution_str: str) -> float:
        return await later(solution_str)


@pytest.mark.parametrize("function", [later, partial(later), Scorer()])
def test_async_functions_are_awaited(function: Any) -> None:
    """On the event loop, objects and partials too."""
    assert run(reward(function).score(finished())).score == 1.0


def test_a_plain_function_may_give_a_coroutine() -> None:
    """It is awaited on the event loop."""

    async def inner() -> str:
        return threading.current_thread().name

    async def check() -> float:
        return float(await inner() == "MainThread")

    assert scored(lambda *_: check()).score == 1.0


def test_plain_functions_run_in_a_thread() -> None:
    """So that they may block; context variables go with them."""
    names = []
    assert scored(lambda: names.append(threading.current_thread()) or 1).score == 1.0
    assert names[0] is not threading.main_thread()
    assert names[0].daemon


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "gave no score: a score must be a number, got None (NoneType)"),
        ("1.0", "gave no score: a score must be a number, got '1.0' (str)"),
        ([1.0], "gave no score: a score must be a number, got [1.0] (list)"),
        (float("nan"), "gave no score: a score must be a finite float32, got nan"),
        (float("-inf"), "gave no score: a score must be a finite float32, got -inf"),
        (np.float64("inf"), "gave no score: a score must be a finite float32, got inf"),
        (1e39, "gave no score: a score must be a finite float32, got 1e+39"),
        (10**400, "gave no score: a score must be a finite float32, got inf"),
        (np.array([1.0]), "gave no score: a score must be a number, got array([1.]) (ndarray)"),
        ({"acc": 1}, "gave a dict without 'score' (keys: acc)"),
        ({}, "gave a dict without 'score' (keys: none)"),
        ({"score": None}, "gave no score: a score must be a number, got None (NoneType)"),
        ({"score": float("nan")}, "gave no score: a score must be a finite float32, got nan"),
        ({"score": 1, 2: 3}, "gave a dict with a key that is no text: 2"),
        ({"score": 1, "seen": {1}}, "EncodeError: a value of type builtins.set cannot cross the wire"),
        ({"score": 1, "seen": {(1, 2): 3}}, "DecodeError: body cannot be read: TypeError: unhashable type: 'list'"),
        ({"score": 1, "error": None}, "gave a dict with 'error', which is the row's own column"),
    ],
    ids=repr,
)
def test_anything_else_is_no_score(value: Any, said: str) -> None:
    """The error names the function and what it gave, and quotes the answer."""
    assert said in failure(lambda: value)
    assert "reward function 'mine.score'" in failure(lambda: value)
    assert failure(lambda: value).endswith("; the answer was 'four'")


def raiser(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


ERRORS = [ValueError("made of cheese"), SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_it_raises_is_the_rows_error(error: BaseException, is_async: bool) -> None:
    """Whatever it is: named, with its cause."""

    async def function() -> Any:
        raise error

    result = scored(function if is_async else raiser(error))
    assert isinstance(result.error, RewardError)
    named = "CallCancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    if isinstance(error, StopIteration):
        named = "RuntimeError: coroutine raised StopIteration"  # Python's own, for no coroutine can raise it
    assert str(result.error).startswith(f"reward function 'mine.score': {named}")
    assert result.error.__cause__ is not None
    assert str(error) in str(result.error)


def test_a_call_that_leaves_through_sys_exit_ends_itself_only() -> None:
    """In a thread as well."""
    assert "SystemExit: 7" in failure(lambda: sys.exit(7))


def test_a_long_answer_is_quoted_in_part() -> None:
    """The error stays readable."""
    assert failure(raiser(ValueError()), finished(text="x" * 1000)).endswith(f"the answer was '{'x' * 400}…'")


def test_the_infos_have_the_error_too() -> None:
    """For `on_error=none`, without the answer."""
    result = scored(raiser(ValueError("made of cheese")))
    assert result.info == {"reward_error": "reward function 'mine.score': ValueError: made of cheese"}
    assert reward(later).needed
    assert not reward(later, on_error="none").needed


# ---- time -----------------------------------------------------------------------------------------------------------


def test_an_async_function_that_hangs_is_cancelled() -> None:
    """After `timeout_s`; it sees the cancellation."""
    seen = []

    async def hang() -> None:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            seen.append(asyncio.get_running_loop().time())
            raise

    assert "DeadlineExceeded: the call took longer than 30 s" in failure(hang, timeout_s=30)
    assert seen == [30]


def test_a_plain_function_that_hangs_is_left_behind() -> None:
    """After `timeout_s`."""
    end = threading.Event()
    try:
        assert "DeadlineExceeded: the call took longer than 0.05 s" in failure(end.wait, timeout_s=0.05)
    finally:
        end.set()


def test_a_timeout_of_the_functions_own_is_its_own() -> None:
    """Named as it is."""
    assert "'mine.score': TimeoutError: the network" in failure(raiser(TimeoutError("the network")))


def test_functions_that_hang_leave_room_for_others() -> None:
    """More hang than may run at once: the others are scored nevertheless, before any of the first times out (G1)."""
    end = threading.Event()

    def function(solution_str: str) -> float:
        return float(solution_str == "hang" and end.wait())

    async def main() -> tuple[list[Scored], list[Scored]]:
        mine = reward(function, Threads(at_once=2, computes_s=0.01), timeout_s=50)
        hanging = [asyncio.create_task(mine.score(finished(text="hang"))) for _ in range(5)]
        others = await asyncio.gather(*(mine.score(finished(text="ok")) for _ in range(5)))
        assert not any(task.done() for task in hanging)
        end.set()
        return others, await asyncio.gather(*hanging)

    others, hanging = asyncio.run(main())
    assert [s.score for s in others] == [0.0] * 5
    assert [s.score for s in hanging] == [1.0] * 5


def test_only_so_many_compute_at_once() -> None:
    """The rest waits, and its time has not begun."""
    started, full, gate = [], threading.Event(), threading.Event()

    def function() -> float:
        started.append(1)
        if len(started) == 3:
            full.set()
        gate.wait()
        return 1.0

    async def main() -> list[Scored]:
        mine = reward(function, Threads(at_once=3, computes_s=50))
        rows = [asyncio.create_task(mine.score(finished())) for _ in range(12)]
        await asyncio.to_thread(full.wait)
        assert len(started) == 3
        gate.set()
        return await asyncio.gather(*rows)

    assert [s.score for s in asyncio.run(main())] == [1.0] * 12


def test_cancelling_ends_the_wait() -> None:
    """Of an async function, which is cancelled; of a plain one, whose thread nobody waits for."""
    seen: list[str] = []
    end = threading.Event()

    async def hang(begun: Callable[[], None]) -> None:
        begun()
        try:
            await asyncio.sleep(10_000)
        finally:
            seen.append("ended")

    def block(begun: Callable[[], None]) -> None:
        begun()
        end.wait()

    async def main(function: Callable[..., Any]) -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        mine = reward(function, kwargs={"begun": partial(loop.call_soon_threadsafe, begun.set)})
        task = asyncio.create_task(mine.score(finished()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main(hang))
    assert seen == ["ended"]
    try:
        asyncio.run(main(block))
    finally:
        end.set()


# ---- finding it -----------------------------------------------------------------------------------------------------


def test_no_function_no_reward() -> None:
    """By default."""
    assert Reward.load(RewardConfig()) is None


def test_it_is_found_by_its_path() -> None:
    """A function of a module."""
    found = Reward.load(RewardConfig(function="support.rewards.length"))
    assert found is not None
    assert asyncio.run(found.score(finished())).score == 4.0


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("support.rewards.no_such", "no_such"),
        ("no_such_module.score", "No module named 'no_such_module'"),
        ("support.rewards.NUMBER", "is a int, neither class nor function"),
        ("support.rewards.Scorer", "is a class; a function is needed"),
        ("score", "score"),
    ],
)
def test_one_that_is_not_there(path: str, why: str) -> None:
    """`ConfigError` with key, value and reason."""
    with pytest.raises(ConfigError, match=rf"reward.function='{path}'.*{why}"):
        Reward.load(RewardConfig(function=path))


@pytest.mark.parametrize(
    ("function", "config", "why"),
    [
        (lambda answer: 0.0, {}, "missing a required argument: 'answer'"),
        (lambda solution_str: 0.0, {"kwargs": {"wieght": 1}}, "got an unexpected keyword argument 'wieght'"),
        (lambda solution_str, /: 0.0, {}, "'solution_str' parameter is positional only|missing a required"),
    ],
)
def test_one_that_cannot_be_called(function: Any, config: dict[str, Any], why: str) -> None:
    """Found at the start, not at the first row."""
    with pytest.raises(ConfigError, match=f"reward.function='mine.score': .*({why}).*solution_str"):
        reward(function, **config)
