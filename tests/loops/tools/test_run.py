"""Running a turn's calls: the contract's sentences on tools, one test each."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.config import MultiTurnConfig
from zagent.errors import InputError
from zagent.loops.parsers import FunctionCall
from zagent.loops.tools import (
    BadArguments,
    BaseTool,
    FunctionTool,
    Toolbox,
    ToolContext,
    ToolResponse,
    ToolResult,
    run_calls,
)
from zagent.types import AgentLoopMetrics


async def add(a: int, b: int) -> int:
    return a + b


def call(name: str = "add", id: str = "1", **arguments: Any) -> FunctionCall:
    return FunctionCall(name, json.dumps(arguments), id)


async def answers(
    calls: list[FunctionCall],
    *tools: Callable[..., Any] | BaseTool,
    context: ToolContext | None = None,
    metrics: AgentLoopMetrics | None = None,
    **limits: Any,
) -> list[ToolResult]:
    box = Toolbox(one if isinstance(one, BaseTool) else FunctionTool(one) for one in tools)
    config = MultiTurnConfig.model_validate({"max_parallel_calls": 8, **limits})
    return await run_calls(box, calls, context or ToolContext(), config, metrics or AgentLoopMetrics())


def answer(one: FunctionCall, *tools: Callable[..., Any] | BaseTool, **options: Any) -> ToolResult:
    """On virtual time: for tools that use no threads."""
    return run(answers([one], *tools, **options))[0]


class Recorder(BaseTool):
    """Notes what is called, with which keywords; ``doing[method]`` is awaited there."""

    def __init__(self, **doing: Callable[[], Any]) -> None:
        super().__init__(tool_schema={"type": "function", "function": {"name": "recorder"}})
        self.doing = doing
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []

    async def _do(self, method: str, instance_id: str | None, keywords: dict[str, Any], default: Any) -> Any:
        self.seen.append((method, instance_id, keywords))
        return await self.doing[method]() if method in self.doing else default

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await self._do("create", instance_id, kwargs, (instance_id, ToolResponse()))

    async def execute(self, instance_id: str, arguments: dict[str, Any], **kwargs: Any) -> Any:
        return await self._do("execute", instance_id, {"arguments": arguments, **kwargs}, ("done", 0.5, {"m": 1}))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._do("calc_reward", instance_id, kwargs, 0.25)

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._do("release", instance_id, kwargs, None)

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.seen]


async def returns(value: Any) -> Any:
    return value


async def raises(error: BaseException) -> Any:
    raise error


async def stubborn() -> None:
    """Goes on for 100 s, cancelled or not."""
    for _ in range(100):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1)


def test_a_call_is_answered_with_the_tools_text() -> None:
    """The message is paired by id, and names the tool."""
    result = answer(call(a=1, b=2, id="x1"), add)
    assert (result.text, result.reward, result.ok) == ("3", 0.0, True)
    assert result.message() == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "x1"}


def test_calls_run_together_and_are_answered_in_their_order() -> None:
    """The slowest decides how long the turn takes; results keep the calls' order and ids."""

    async def wait(s: float) -> str:
        await asyncio.sleep(s)
        return f"after {s:g}"

    async def main() -> None:
        metrics = AgentLoopMetrics(tool_calls=1.0)
        calls = [call("wait", id=str(s), s=s) for s in (3, 1, 2)]
        results = await answers(calls, wait, metrics=metrics)
        assert [(r.call.id, r.text) for r in results] == [("3", "after 3"), ("1", "after 1"), ("2", "after 2")]
        assert metrics.tool_calls == pytest.approx(4.0)
        assert metrics.tool_calls_ok == 3

    run(main())


def test_calls_beyond_the_limit_are_answered_as_skipped_and_counted() -> None:
    """Pitfalls E6 and E14: not run, but every id has its reply; one call by default."""
    done: list[int] = []

    async def note(n: int) -> int:
        done.append(n)
        return n

    metrics = AgentLoopMetrics()
    calls = [call("note", id=str(n), n=n) for n in range(3)]
    results = run(answers(calls, note, metrics=metrics, max_parallel_calls=1))
    assert done == [0]
    assert [r.call.id for r in results] == ["0", "1", "2"]
    assert [r.text for r in results] == ["0", *["Error: skipped: only 1 call per turn is run"] * 2]
    assert [r.ok for r in results] == [True, False, False]
    assert (metrics.tool_calls_ok, metrics.tool_calls_failed, metrics.tool_calls_skipped) == (1, 0, 2)
    assert MultiTurnConfig().max_parallel_calls == 1


def test_a_tool_that_takes_too_long_is_answered_as_timed_out() -> None:
    """Pitfall E7: at its deadline, with the siblings' results kept."""

    async def hang() -> None:
        await asyncio.sleep(1e9)

    async def main() -> None:
        metrics = AgentLoopMetrics()
        first, second = await answers([call("hang"), call(a=1, b=2)], hang, add, tool_timeout=5, metrics=metrics)
        assert first.text == "Error: tool 'hang' timed out after 5s"
        assert (first.ok, first.reward, second.text) == (False, 0.0, "3")
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert metrics.tool_calls_failed == 1

    run(main())


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward"])
def test_the_deadline_covers_the_whole_call(method: str) -> None:
    """create, execute and calc_reward together; release still runs, once."""
    doing = {method: lambda: asyncio.sleep(10)}
    if method == "calc_reward":
        doing["execute"] = lambda: returns(("done", None, {}))  # type: ignore[dict-item, return-value]
    tool = Recorder(**doing)
    assert answer(call("recorder"), tool, tool_timeout=0.5).text == "Error: tool 'recorder' timed out after 0.5s"
    assert tool.methods[-2:] == [method, "release"]
    assert tool.methods.count("release") == 1


def test_a_tool_that_ignores_its_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The trajectory goes on after a grace of 1 s, and the log says so."""

    async def main() -> None:
        result = (await answers([call("stubborn")], stubborn, tool_timeout=5))[0]
        assert result.text == "Error: tool 'stubborn' timed out after 5s"
        assert asyncio.get_running_loop().time() == pytest.approx(6)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]

    run(main())
    assert "tool 'stubborn' goes on though it was cancelled 1 s ago: left behind" in caplog.text


def test_a_tool_that_blocks_its_thread_does_not_hold_its_trajectory() -> None:
    """Nor the tools of others: every synchronous call has a thread of its own."""
    free = threading.Event()

    def block() -> None:
        free.wait()

    async def main() -> None:
        try:
            results = await answers([call("block") for _ in range(100)], block, tool_timeout=5, max_parallel_calls=100)
        finally:
            free.set()
        assert {result.text for result in results} == {"Error: tool 'block' timed out after 5s"}

    run(main())


VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


def test_a_synchronous_function_runs_in_a_thread() -> None:
    """With the caller's context variables; the event loop stays free."""
    here = threading.get_ident()

    def where() -> str:
        assert threading.get_ident() != here
        return VARIABLE.get()

    async def main() -> str:
        VARIABLE.set("mine")
        return (await answers([call("where")], where))[0].text

    assert asyncio.run(main()) == "mine"


def fails(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def fails_async(error: BaseException) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("make", [fails, fails_async])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "Error when executing tool 'fail': ValueError: no"),
        (TimeoutError(), "Error when executing tool 'fail': TimeoutError"),
        (SystemExit(3), "Error when executing tool 'fail': SystemExit: 3"),
        (KeyboardInterrupt(), "Error when executing tool 'fail': KeyboardInterrupt"),
        (asyncio.CancelledError(), "Error when executing tool 'fail': CancelledError"),
        (BadArguments("a: wrong"), "Error: arguments of 'fail' do not fit: a: wrong"),
        (RuntimeError("x" * 1000), "Error when executing tool 'fail': RuntimeError: " + "x" * 1000),
    ],
)
def test_whatever_a_tool_raises_is_told_and_the_loop_goes_on(
    make: Callable[..., Any], error: BaseException, text: str
) -> None:
    """Sync or async, `sys.exit()` too; reward 0.0, and the sibling's result is kept."""
    calls = [call("fail"), call(a=1, b=1)]
    first, second = asyncio.run(answers(calls, make(error), add, max_tool_response_length=2000))
    assert (first.text, first.reward, first.ok) == (text, 0.0, False)
    assert second.text == "2"


def test_stop_iteration_is_an_error_like_others() -> None:
    """No future can hold it, so it must not get into one."""
    result = asyncio.run(answers([call("fail")], fails(StopIteration("end")), tool_timeout=30))[0]
    assert result.text.startswith("Error when executing tool 'fail': RuntimeError: coroutine raised StopIteration")


def test_an_unknown_tool_is_told_with_the_known_ones() -> None:
    """The model may choose again."""
    assert answer(call("foo"), add).text == "Error: unknown tool 'foo'; available: add"
    assert answer(call("foo")).text == "Error: unknown tool 'foo'; available: none"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "not json",
        "[1]",
        "1",
        "null",
        '"text"',
        '{"a": NaN, "b": 1}',
        '{"a": 1',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:12],
)
def test_arguments_that_are_no_json_object_are_told(arguments: str) -> None:
    """Reward 0.0; the tool is not called."""
    tool = Recorder()
    result = answer(FunctionCall("recorder", arguments, "7"), tool)
    assert result.text.startswith("Error: arguments of 'recorder' are not a JSON object: ")
    assert (result.ok, result.reward, tool.seen) == (False, 0.0, [])


def test_arguments_that_do_not_fit_a_function_are_told() -> None:
    """Missing, of another type, unknown."""
    assert answer(call(a=1), add).text == "Error: arguments of 'add' do not fit: b: Field required"
    assert "b: Input should be a valid integer" in answer(call(a=1, b="x"), add).text
    assert answer(call(a=1, b=2, c=3), add).text == "Error: arguments of 'add' do not fit: c: there is no such argument"


def test_a_call_that_could_not_be_read_is_answered_with_its_error() -> None:
    """Pitfall E2: never dropped; valid siblings still run."""
    broken = FunctionCall("add", '{"a"', "1", error="Error: the call of 'add' is not valid JSON")
    metrics = AgentLoopMetrics()
    first, second = run(answers([broken, call(a=1, b=1)], add, metrics=metrics))
    assert (first.text, first.ok, second.text) == ("Error: the call of 'add' is not valid JSON", False, "2")
    assert (metrics.tool_calls_ok, metrics.tool_calls_failed) == (1, 1)
    assert answer(FunctionCall("", "", "1", error="Error: ?"), add).message()["name"] == "unknown"


def test_a_tool_lives_through_create_execute_release() -> None:
    """With one instance id, and the row's keywords for each method."""
    tool = Recorder(execute=lambda: returns(("done", None, {"m": 1})))
    kwargs = {f"{method}_kwargs": {"k": method} for method in ("create", "execute", "calc_reward", "release")}
    result = answer(call("recorder", q=1), tool, context=ToolContext(row={"tools_kwargs": {"recorder": kwargs}}))
    assert tool.methods == ["create", "execute", "calc_reward", "release"]
    assert len({instance for _, instance, _ in tool.seen}) == 1
    assert [keywords["k"] for _, _, keywords in tool.seen] == ["create", "execute", "calc_reward", "release"]
    assert tool.seen[1][2]["arguments"] == {"q": 1}
    assert (result.text, result.reward, result.metrics) == ("done", 0.25, {"m": 1})


def test_a_reward_from_execute_is_the_calls_reward() -> None:
    """calc_reward is asked only where there is none; 0.0 is one."""
    tool = Recorder(execute=lambda: returns(("done", 0.0, {})))
    assert answer(call("recorder"), tool).reward == 0.0
    assert "calc_reward" not in tool.methods


@pytest.mark.parametrize("created", [("own", ToolResponse()), "own"], ids=["pair", "id"])
def test_the_tool_may_choose_its_instance_id(created: Any) -> None:
    """As verl's tools do, the older ones without a response."""
    tool = Recorder(create=lambda: returns(created))
    answer(call("recorder"), tool)
    assert [instance for _, instance, _ in tool.seen[1:]] == ["own", "own"]


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward"])
def test_release_runs_after_any_error(method: str) -> None:
    """Once, also where create itself failed."""
    doing = {"execute": lambda: returns(("done", None, {})), method: lambda: raises(ValueError("no"))}
    tool = Recorder(**doing)
    assert answer(call("recorder"), tool).text == "Error when executing tool 'recorder': ValueError: no"
    assert tool.methods.count("release") == 1


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no"), "ValueError: no"), (SystemExit(1), "SystemExit: 1")], ids=repr
)
def test_errors_of_release_are_logged_and_not_raised(
    error: BaseException, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Pitfall E10: the result stands."""
    tool = Recorder(release=lambda: raises(error))
    assert answer(call("recorder"), tool).text == "done"
    assert f"release of tool 'recorder' failed: {said}" in caplog.text


def test_release_has_its_own_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """5 s; the call's own result stands."""

    async def main() -> None:
        tool = Recorder(release=lambda: asyncio.sleep(1e9))
        assert (await answers([call("recorder")], tool, tool_timeout=100))[0].text == "done"
        assert asyncio.get_running_loop().time() == pytest.approx(5)

    run(main())
    assert "release of tool 'recorder' failed: TimeoutError" in caplog.text


def test_a_release_that_ignores_its_end_does_not_hold_the_trajectory() -> None:
    """One more second, then it is left behind."""

    async def main() -> None:
        await answers([call("recorder")], Recorder(release=stubborn))
        assert asyncio.get_running_loop().time() == pytest.approx(6)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]

    run(main())


def test_a_cancelled_trajectory_cancels_its_tools_and_releases_them() -> None:
    """All of them, once each, before the cancellation gets through."""
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("hang")

    async def main() -> None:
        tool = Recorder(execute=hang, release=lambda: asyncio.sleep(1))
        task = asyncio.create_task(answers([call("recorder"), call("recorder")], tool, tool_timeout=100))
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["hang", "hang"]
        assert tool.methods.count("release") == 2
        assert asyncio.get_running_loop().time() == pytest.approx(3)

    run(main())


def test_a_second_cancellation_does_not_stop_the_release() -> None:
    """It goes on by itself."""
    released: list[float] = []

    async def slow() -> None:
        await asyncio.sleep(2)
        released.append(asyncio.get_running_loop().time())

    async def main() -> None:
        task = asyncio.create_task(
            answers([call("recorder")], Recorder(execute=lambda: asyncio.sleep(1e9), release=slow))
        )
        for _ in range(2):
            await asyncio.sleep(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(5)
        assert released == [3.0]

    run(main())


def test_a_call_cancelled_before_it_began_is_not_released() -> None:
    """There is nothing to release, and no coroutine is left unawaited."""

    async def main() -> None:
        tool = Recorder()
        task = asyncio.create_task(answers([call("recorder")], tool))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tool.methods == []

    run(main())


def test_a_tool_is_given_its_context() -> None:
    """The row's, with this tool's own part of `tools_kwargs`; `trajectory_data` is one dict for all of them."""
    shared: dict[str, Any] = {}
    row = {"tools_kwargs": {"look": {"secret": 1}, "other": {"secret": 2}}, "uid": "u"}

    async def look(word: str, context: ToolContext) -> str:
        context.trajectory_data[word] = context.kwargs
        return f"{context.session} {context.attempt} {context.row['uid']} {context.services['judge']}"

    context = ToolContext({"judge": "J"}, "s", 2, row, {}, shared)
    results = run(answers([call("look", word="a"), call("look", word="b")], look, context=context))
    assert [result.text for result in results] == ["s 2 u J"] * 2
    assert shared == {"a": {"secret": 1}, "b": {"secret": 1}}


def test_a_classs_methods_are_given_the_context_too() -> None:
    """By annotation, wherever it stands."""

    class Tool(Recorder):
        async def execute(self, instance_id: str, arguments: dict[str, Any], where: ToolContext, **kwargs: Any) -> Any:
            return where.session

    assert answer(call("recorder"), Tool(), context=ToolContext(session="s")).text == "s"


def test_a_classs_methods_may_be_synchronous() -> None:
    """They run in threads, like functions."""
    here = threading.get_ident()
    threads: list[int] = []

    class Tool(BaseTool):
        def execute(self, instance_id: str, arguments: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            threads.append(threading.get_ident())
            return "done"

        def release(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
            threads.append(threading.get_ident())

    tool = Tool(tool_schema={"function": {"name": "t"}})
    assert asyncio.run(answers([call("t")], tool))[0].text == "done"
    assert len(threads) == 2
    assert here not in threads


@pytest.mark.parametrize(
    "kwargs",
    ["text", [1], {"add": "text"}, {"add": [1]}, {"add": {"create_kwargs": "x"}}, {"add": {"release_kwargs": 1}}],
)
def test_tools_kwargs_of_another_form_fail_the_row(kwargs: Any) -> None:
    """The data set's fault is not told to the model as the tool's."""
    with pytest.raises(InputError, match="tools_kwargs must be a map"):
        answer(call(a=1, b=2), add, context=ToolContext(row={"tools_kwargs": kwargs}))


def test_rows_without_tools_kwargs_work() -> None:
    """None as well: a column that other rows have."""
    assert answer(call(a=1, b=2), add, context=ToolContext(row={"tools_kwargs": None})).text == "3"


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...ghij"), ("right", "abcd...(truncated)"), ("middle", "ab...(truncated)...ij")],
)
def test_text_is_cut_at_the_configured_side(side: str, text: str) -> None:
    """Answers and errors alike."""

    async def say() -> str:
        return "abcdefghij"

    limits = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
    assert answer(call("say"), say, **limits).text == text
    assert "truncated" in answer(call("nope"), say, **limits).text


def test_256_characters_are_kept_of_both_ends_by_default() -> None:
    """The contract's defaults."""

    async def say() -> str:
        return "a" * 1000 + "b" * 1000

    assert answer(call("say"), say).text == "a" * 128 + "...(truncated)..." + "b" * 128


def test_a_result_that_is_no_text_is_an_error_that_names_its_type() -> None:
    """And so is a reward that is not finite."""

    async def give() -> Any:
        return b"bytes"

    async def score() -> Any:
        return "x", float("nan")

    assert answer(call("give"), give).text == (
        "Error when executing tool 'give': TypeError: the tool returned bytes, which is no text"
    )
    assert answer(call("score"), score).text == (
        "Error when executing tool 'score': ValueError: the tool's reward must be a finite number, got nan"
    )


def test_text_that_no_tokenizer_takes_is_made_so() -> None:
    """A lone surrogate out of the model's own arguments."""

    async def echo(text: str) -> str:
        return text

    assert answer(FunctionCall("echo", '{"text": "a\\ud800"}', "1"), echo).text == "a?"


def test_images_and_videos_are_parts_of_the_message() -> None:
    """Before the text, with their bytes."""

    async def draw() -> ToolResponse:
        return ToolResponse(text="here", image=[b"i1", b"i2"], video=[b"v"])

    result = answer(call("draw"), draw)
    assert (result.images, result.videos) == ([b"i1", b"i2"], [b"v"])
    assert result.message()["content"] == [
        {"type": "image", "image": b"i1"},
        {"type": "image", "image": b"i2"},
        {"type": "video", "video": b"v"},
        {"type": "text", "text": "here"},
    ]


def test_a_failing_tool_leaves_its_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At level info: thousands of rows may fail alike."""
    caplog.set_level(logging.INFO)
    answer(call("fail"), fails_async(ValueError("no")))
    assert "tool 'fail' failed" in caplog.text
    assert "in fail" in caplog.text


def test_no_calls_take_no_time() -> None:
    """And give no results."""
    assert run(answers([], add)) == []
