"""A user's class as an actor: its public methods by name, and its life from the constructor to `close`."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from zagent.errors import ConfigError, InvalidRequest, StartupError, TransientError
from zagent.loops.imports import find_object
from zagent.loops.threads import started
from zagent.wire.messages import Call

Function = TypeVar("Function", bound=Callable[..., Any])

#: Called by the service's process itself, and by nobody else.
LIFECYCLE = frozenset({"start", "close"})
#: What `ServicePool` has itself: a caller would never reach the class's own.
HIDDEN = frozenset({"bind"})
_MARK = "__zagent_idempotent__"


def idempotent(method: Function) -> Function:
    """Mark a service's method as one that may run twice: a call whose process died is sent to another one. Without it
    the caller gets `MemberLost`, since the method may have begun."""
    function = getattr(method, "__func__", method)  # of a classmethod or staticmethod
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"idempotent marks methods, got {method!r}")
    setattr(function, _MARK, True)
    return method


def build(name: str, target: str, args: Mapping[str, Any], services: Any) -> Any:
    """An object of the class at the dotted path ``target``, for service ``name``. A constructor with a parameter called
    ``services`` is given them.

    Raises:
        ConfigError: it cannot be imported, is no class, takes other arguments, or has a method that would be hidden.
        StartupError: its constructor raised.
    """
    kind = find_object(f"services.{name}.target", target)
    if not isinstance(kind, type):
        raise ConfigError(f"services.{name}.target={target!r} is a {type(kind).__name__}, not a class")
    for method in HIDDEN.intersection(public_methods(kind)):
        raise ConfigError(f"services.{name}.target={target!r}: a method cannot be called {method!r} in a service")
    try:
        signature = inspect.signature(kind)
        if "services" in signature.parameters:
            args = {"services": services, **args}
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(f"services.{name}.args: {kind.__name__}: {error}") from error
    except ValueError:  # a class of C code tells no signature
        pass
    try:
        return kind(**args)
    except (Exception, SystemExit) as error:
        raise _failed(name, f"{kind.__name__}()", error) from error


def public_methods(kind: type) -> list[str]:
    """Names of the methods that callers may use: without a leading underscore, `start` and `close` aside."""
    names = [name for name in dir(kind) if not name.startswith("_") and name not in LIFECYCLE]
    return [name for name in names if _is_method(getattr(kind, name))]


def _is_method(attribute: Any) -> bool:
    return callable(attribute) and not isinstance(attribute, type)


def _failed(name: str, what: str, error: BaseException) -> StartupError:
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return StartupError(f"services.{name}: {what} raised {said}")


class Actor:
    """``target`` as the service ``name``. ``methods`` are what a `zagent.client.member.Member` serves; each takes
    ``[positional arguments, keyword arguments]``."""

    def __init__(self, name: str, target: Any) -> None:
        self._name = name
        self._target = target
        #: The process ends: calls in threads are not waited for any more.
        self.leaving = False
        public = {method: getattr(target, method) for method in public_methods(type(target))}
        self.idempotent = [method for method, bound in public.items() if getattr(bound, _MARK, False)]
        self.methods = {method: self._served(method, bound) for method, bound in public.items()}

    async def start(self) -> None:
        """The class's own `start`, if it has one. Raises `StartupError` where that raises."""
        try:
            await self._hook("start")
        except (Exception, SystemExit) as error:
            raise _failed(self._name, f"{type(self._target).__name__}.start()", error) from error

    async def close(self, timeout: float) -> None:
        """The class's own `close`, if it has one; what goes wrong there is in the log."""
        try:
            async with asyncio.timeout(timeout):
                await self._hook("close")
        except TimeoutError:
            print(f"services.{self._name}: close() took longer than {timeout:g} s", file=sys.stderr, flush=True)
        except (Exception, SystemExit):
            traceback.print_exc()

    async def _hook(self, name: str) -> None:
        hook = getattr(self._target, name, None)
        if callable(hook):
            result = hook()
            if inspect.isawaitable(result):
                await result

    def _served(self, name: str, method: Callable[..., Any]) -> Callable[[Any, Call], Awaitable[Any]]:
        on_loop = inspect.iscoroutinefunction(method)

        async def served(argument: Any, call: Call) -> Any:
            args, kwargs = _arguments(argument)
            try:
                result = method(*args, **kwargs) if on_loop else await self._in_thread(lambda: method(*args, **kwargs))
                return await result if inspect.isawaitable(result) else result
            except TransientError as error:  # of a call of the method's own: the method has begun all the same
                error.repeatable = name in self.idempotent
                raise

        return served

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """What ``function()`` returns or raises, in a thread of its own.

        Nothing can end a thread, so a call that is cancelled is answered (as cancelled) when its thread has ended:
        until then it keeps its place among the process's `max_in_flight`, and the broker's count is the truth. Its
        caller, who gave it up, does not wait for that.
        """
        answer = started(function)
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait((answer,))
            except asyncio.CancelledError as error:
                if self.leaving:
                    raise
                cancelled = cancelled or error
        if cancelled is not None:
            raise cancelled
        result, failure = answer.result()
        if failure is not None:
            raise failure
        return result


def _arguments(argument: Any) -> tuple[list[Any], dict[str, Any]]:
    """Raises `InvalidRequest` where a caller sent something else."""
    if isinstance(argument, list) and [type(part) for part in argument] == [list, dict]:
        return argument[0], argument[1]
    raise InvalidRequest("a service's method takes [positional arguments, keyword arguments]")
