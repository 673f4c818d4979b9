"""A user's class as an actor: which methods it has, how they run, how it lives."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import zagent
from support import actors
from zagent.errors import ConfigError, InvalidRequest, MemberLost, StartupError
from zagent.service.base import Actor, build, idempotent, public_methods
from zagent.wire.messages import Call

CALL = Call(b"\x01" * 16, 1, "s", "m")


def call(actor: Actor, method: str, *args: Any, **kwargs: Any) -> Any:
    return actor.methods[method]([list(args), kwargs], CALL)


def answer(target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(call(Actor("s", target), method, *args, **kwargs))


def test_public_methods_are_those_a_caller_may_use() -> None:
    """Methods of all kinds, inherited ones too; no attributes, classes, properties, private or lifecycle methods."""

    class Child(actors.Everything):
        def more(self) -> None:
            """Its own."""

    names = {"greet", "add", "twice", "kind", "where", "raises", "exits", "passes_on", "spawns_an_exit"}
    names |= {"sleep", "nap", "numbers", "more"}
    assert set(public_methods(Child)) == names
    assert public_methods(actors.Living) == ["pid"]


def test_methods_take_positional_and_keyword_arguments() -> None:
    """Async and sync, static and class methods."""
    actor = Actor("s", actors.Everything("hi"))

    async def main() -> list[Any]:
        return [
            await call(actor, "greet", "Ann", mark="?"),
            await call(actor, "add", 1),
            await call(actor, "add", 1, b=2),
            await call(actor, "twice", 3),
            await call(actor, "kind"),
        ]

    assert asyncio.run(main()) == ["hi Ann?", 2, 3, [3, 3], "Everything"]


def test_a_synchronous_method_runs_in_a_thread() -> None:
    """The event loop stays free."""
    assert answer(actors.Everything(), "where") != threading.current_thread().name


def test_a_synchronous_function_that_returns_an_awaitable_is_awaited() -> None:
    """A decorator may hide that a method is async."""

    class Hidden:
        def method(self) -> Any:
            return asyncio.sleep(0, "awaited")

    assert answer(Hidden(), "method") == "awaited"


@pytest.mark.parametrize("argument", [None, [], [[]], [[], {}, 1], [{}, []], "text", {"args": []}], ids=repr)
def test_an_argument_of_another_form_is_refused(argument: Any) -> None:
    """Any peer may send it."""
    with pytest.raises(InvalidRequest, match="positional arguments, keyword arguments"):
        asyncio.run(Actor("s", actors.Everything()).methods["add"](argument, CALL))  # type: ignore[arg-type]


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"c": 3})])
def test_wrong_arguments_are_a_type_error(args: Any, kwargs: Any) -> None:
    """Python's own."""
    with pytest.raises(TypeError, match="add"):
        answer(actors.Everything(), "add", *args, **kwargs)


def test_what_a_thread_raises_is_raised() -> None:
    """`sys.exit` included: it is that call's error."""
    with pytest.raises(SystemExit):
        answer(actors.Everything(), "exits")


@pytest.mark.parametrize(("method", "repeatable"), [("raises", False), ("passes_on", True)])
def test_a_transient_error_of_the_methods_own_is_repeatable_where_the_method_is(method: str, repeatable: bool) -> None:
    """A call that it made itself was lost: the method has begun, and only an idempotent one may begin again."""
    with pytest.raises(MemberLost) as caught:
        answer(actors.Everything(), method, *(["lost"] if method == "raises" else []))
    assert caught.value.repeatable is repeatable


def test_idempotent_methods_are_known_by_name() -> None:
    """Whatever kind of method it is, and in whichever order the decorators stand."""
    assert sorted(Actor("s", actors.Everything()).idempotent) == ["kind", "nap", "passes_on", "twice"]


@pytest.mark.parametrize("what", [actors.Everything, 5, "text"], ids=repr)
def test_idempotent_marks_methods_only(what: Any) -> None:
    """A class or a value is a mistake."""
    with pytest.raises(TypeError, match="idempotent marks methods"):
        idempotent(what)


class Blocks:
    """A method that nothing can stop, but the test."""

    def __init__(self) -> None:
        self.began, self.free = threading.Event(), threading.Event()
        self.ended = False

    def block(self) -> str:
        self.began.set()
        assert self.free.wait(20)
        self.ended = True
        return "done"


def test_a_cancelled_thread_keeps_its_place_until_it_ends() -> None:
    """Its answer, that it was cancelled, comes when the thread has ended: the first reason, whatever follows."""

    async def main() -> tuple[bool, Any]:
        target = Blocks()
        task = asyncio.ensure_future(call(Actor("s", target), "block"))
        await asyncio.to_thread(target.began.wait)
        task.cancel("deadline")
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel("again")
        for _ in range(3):
            await asyncio.sleep(0)
        waits = not task.done()
        target.free.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return waits, caught.value.args

    assert asyncio.run(main()) == (True, ("deadline",))


def test_a_process_that_leaves_does_not_wait_for_threads() -> None:
    """They end with it."""

    async def main() -> bool:
        target = Blocks()
        actor = Actor("s", target)
        task = asyncio.ensure_future(call(actor, "block"))
        await asyncio.to_thread(target.began.wait)
        actor.leaving = True
        task.cancel()
        await asyncio.wait([task], timeout=5)  # only a failing test waits as long
        first = task.cancelled() and not target.ended
        target.free.set()
        await asyncio.wait([task])
        return first

    assert asyncio.run(main())


# ---- from the configuration to an object -----------------------------------------------------------------------------


def test_the_class_is_built_with_its_arguments() -> None:
    """By dotted path."""
    made = build("s", "support.actors.Everything", {"greeting": "hey"}, None)
    assert made.greeting == "hey"


def test_a_constructor_that_asks_for_services_gets_them() -> None:
    """By the parameter's name; what the configuration says under that name wins."""
    services = zagent.Services(None, ["back"])  # type: ignore[arg-type]
    assert build("s", "support.actors.Front", {"name": "n"}, services)._services is services
    assert build("s", "support.actors.Front", {"services": 5}, services)._services == 5


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("support.actors.Nobody", {}, r"services\.s\.target='support\.actors\.Nobody' cannot be imported"),
        ("no_such_module.Thing", {}, r"services\.s\.target=.*No module named 'no_such_module'"),
        (
            "support.actors.a_function",
            {},
            r"services\.s\.target='support\.actors\.a_function' is a function, not a class",
        ),
        ("support.actors.Binds", {}, r"services\.s\.target=.*a method cannot be called 'bind'"),
        ("support.actors.Everything", {"greting": "x"}, r"services\.s\.args: Everything: .*'greting'"),
    ],
)
def test_a_target_that_cannot_be_used_is_named(target: str, args: Any, message: str) -> None:
    """`ConfigError`, with the key and the reason."""
    with pytest.raises(ConfigError, match=message):
        build("s", target, args, None)


@pytest.mark.parametrize(("how", "said"), [("raise", "licence: 7"), ("exit", "SystemExit: no licence")])
def test_a_constructor_that_raises_fails_the_start(how: str, said: str) -> None:
    """With the last line of what it raised."""
    with pytest.raises(StartupError, match=rf"services\.s: Refuses\(\) raised .*{said}$"):
        build("s", "support.actors.Refuses", {"how": how}, None)


def test_a_start_that_raises_fails_the_start() -> None:
    """Named like the constructor."""
    with pytest.raises(
        StartupError, match=r"services\.s: Unstartable\.start\(\) raised OSError: cannot reach the data"
    ):
        asyncio.run(Actor("s", actors.Unstartable()).start())


def test_lifecycle_hooks_may_be_synchronous_or_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """What `close` raises is in the log, and ends nothing."""
    hooks = actors.Hooks()

    async def main() -> None:
        for target in (hooks, actors.Everything()):
            actor = Actor("s", target)
            await actor.start()
            await actor.close(1.0)

    asyncio.run(main())
    assert hooks.seen == ["start", "close"]
    assert "RuntimeError: closing failed" in capsys.readouterr().err


def test_a_close_that_hangs_is_given_up(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """After its time; the log says so."""
    living = actors.Living(str(tmp_path / "life"), hang_on_close=True)
    asyncio.run(Actor("s", living).close(0.01))
    assert "services.s: close() took longer than 0.01 s" in capsys.readouterr().err
    assert (tmp_path / "life").read_text().split() == ["made", "closing"]
