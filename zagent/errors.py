"""Every error zagent raises, by what the caller can do about it.

    ZagentError
    ├── CallerError             the caller's fault; never retried
    │   ├── ConfigError             a wrong key, type or combination; before any process starts
    │   ├── InputError              a batch, row or prompts file that cannot be used
    │   ├── InvalidRequest          an engine call that cannot be run as sent
    │   │   └── PromptTooLong           prompt beyond rollout.prompt_length or the model's context
    │   ├── StateError              an order that does not fit the engines' state (asleep, say)
    │   ├── PoisonedRequest         the call crashed two members that ran it
    │   ├── UnknownAgent            no loop of that name
    │   ├── UnknownMethod           the pool's members have no such method
    │   ├── UnknownService          no service of that name (a KeyError, too)
    │   ├── LoopError               an agent loop raised or returned something unusable
    │   │   └── TemplateError           a chat template that cannot do what the loop needs
    │   ├── RewardError             a reward function raised, took too long or gave no finite number
    │   └── LogprobMismatch         a batch that was not sampled from the trainer's model as it is
    ├── TransientError          somebody else's fault; tried again elsewhere, if `repeatable`
    │   ├── MemberLost              the member that had the call is gone
    │   ├── Refused                 the member is leaving or asleep, and took nothing on
    │   └── Overloaded              the broker's queue is full
    ├── PoolLost                the pool's members are gone for good
    ├── DeadlineExceeded        the call's time ran out
    ├── CallCancelled           the caller, or the batch it belongs to, gave the call up
    ├── ConnectionLost          the link to the broker is closed or was never welcomed
    ├── StartupError            a process did not become ready
    ├── RolloutError            too many rows failed; carries every outcome
    ├── EngineError             the engine broke while it ran the call
    ├── WeightUpdateError       new weights could not be brought into the engines; the former ones serve on
    ├── RemoteError             a foreign exception that has no class on this side
    └── ProtocolError           bytes that are no message
        ├── DecodeError             carries the frames
        ├── EncodeError             a value that cannot cross the wire
        └── VersionMismatch         peers of different versions of zagent, or of the wire

Errors cross the wire by name (`to_wire`, `from_wire`): a `ZagentError` or a builtin exception comes back as the same
class, with the remote traceback as its cause; anything else as `RemoteError`.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Sequence
from typing import Any


class ZagentError(Exception):
    """Root of the tree. ``fields`` names attributes that cross the wire with the message."""

    fields: tuple[str, ...] = ()


class CallerError(ZagentError):
    """The caller's fault: trying again changes nothing."""


class ConfigError(CallerError):
    """A configuration that cannot be used; raised before any process starts."""


class InputError(CallerError):
    """A batch, row or prompts file that cannot be used; names the key, row or line."""


class InvalidRequest(CallerError):
    """An engine call that cannot be run as sent: bad ids, an unknown sampling key, an empty prompt."""


class PromptTooLong(InvalidRequest):
    """The prompt exceeds `rollout.prompt_length` or the model's context."""


class StateError(CallerError):
    """An order that does not fit the state of the engines: sleep while calls run, wake up what is awake."""


class PoisonedRequest(CallerError):
    """Two members died by themselves while they ran this call, the second with no other suspect aboard."""


class UnknownAgent(CallerError):
    """No agent loop of that name; the message lists the known ones."""


class UnknownMethod(CallerError):
    """The members of that pool have no such method."""


class UnknownService(CallerError, KeyError):
    """No service of that name in this cluster; the message lists those there are."""

    __str__ = Exception.__str__  # a KeyError's would be quoted


class LoopError(CallerError):
    """An agent loop raised, or returned something that is no usable `AgentLoopOutput`."""


class TemplateError(LoopError):
    """A chat template that cannot do what the loop needs; names the template, the roles and the reason."""


class RewardError(CallerError):
    """A reward function raised, took too long or gave something that is no finite number."""


class LogprobMismatch(CallerError):
    """The engines' log-probabilities of a batch are not the trainer's; says what `check_logprobs` found."""


class TransientError(ZagentError):
    """Not the caller's fault; the pending table tries again, elsewhere where it can.

    ``repeatable`` False: not again, since the member may have begun and twice could do harm (a service's method that is
    not `idempotent`).
    """

    fields: tuple[str, ...] = ("repeatable",)

    def __init__(self, *args: Any, repeatable: bool = True) -> None:
        super().__init__(*args)
        self.repeatable = repeatable


class MemberLost(TransientError):
    """The member that held the call is gone; its work on the call is lost.

    ``crashed``: it died by itself, and this call may be the reason.
    """

    fields = ("repeatable", "crashed")

    def __init__(self, *args: Any, repeatable: bool = True, crashed: bool = False) -> None:
        super().__init__(*args, repeatable=repeatable)
        self.crashed = crashed


class Refused(TransientError):
    """The member is leaving, or asleep, and did not take the call on."""


class Overloaded(TransientError):
    """The broker's queue (`broker.max_pending`) is full."""


class PoolLost(ZagentError):
    """No member of the pool is left and none will be started again; the message quotes the last one's log."""


class DeadlineExceeded(ZagentError):
    """The call's time ran out before an answer came."""


class CallCancelled(ZagentError):
    """The call was given up by its caller."""


class ConnectionLost(ZagentError):
    """The link to the broker is closed, or the broker did not welcome it in time."""


class StartupError(ZagentError):
    """A process did not become ready; the message quotes the end of its log."""


class EngineError(ZagentError):
    """The engine failed while it ran the call."""


class RolloutError(ZagentError):
    """More rows failed than `rollout.max_failed_fraction` allows.

    ``finished`` holds every row's `Outcome`, in input order, so that nothing is lost.
    """

    def __init__(self, message: str, finished: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.finished = list(finished)


class WeightUpdateError(ZagentError):
    """New weights could not be brought into the engines, and none serves them: what served before does."""


class RemoteError(ZagentError):
    """A foreign exception raised in another process; ``type_name`` is its qualified class name."""

    fields = ("type_name",)

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class ProtocolError(ZagentError):
    """Bytes or values that are no message of ours."""


class DecodeError(ProtocolError):
    """A message that cannot be read; ``frames`` are its bytes, for the log."""

    def __init__(self, message: str, frames: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.frames = tuple(frames)


class EncodeError(ProtocolError):
    """A value that cannot cross the wire; names its type."""


class VersionMismatch(ProtocolError):
    """The peers have different versions of zagent, or speak different ones of the wire; both are named."""


class RemoteTraceback(Exception):
    """Cause of an error that came over the wire: shows the traceback of the other process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def known_errors() -> dict[str, type[ZagentError]]:
    """All classes of the tree by name."""
    found: dict[str, type[ZagentError]] = {}
    todo: list[type[ZagentError]] = [ZagentError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: ``type``, ``message``, ``traceback``, ``fields``."""
    kind = type(error)
    own = isinstance(error, ZagentError) or kind.__module__ == "builtins"
    return {
        "type": kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}",
        "message": _text(error.args[0] if len(error.args) == 1 else error),
        "traceback": _text("".join(traceback.format_exception(error))) if error.__traceback__ else "",
        "fields": _fields(error) if isinstance(error, ZagentError) else {},
    }


def _fields(error: ZagentError) -> dict[str, Any]:
    """A user's subclass may lack them (a constructor that does not call ours), or keep anything there."""
    values = {name: getattr(error, name, None) for name in error.fields}
    return {name: value for name, value in values.items() if isinstance(value, (bool, str))}


def _text(value: Any) -> str:
    """``str(value)`` that can cross the wire whatever it is: lone surrogates escaped, a failing ``__str__`` named."""
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except BaseException as error:
        return f"<{type(value).__name__} without text: {type(error).__name__}>"


def from_wire(data: Any) -> Exception:
    """The exception that `to_wire` described; an unknown type, or what is no description, becomes `RemoteError`."""
    if not isinstance(data, dict):
        return RemoteError(f"an error that cannot be read: {data!r}"[:200])
    name, message = str(data.get("type", "")), str(data.get("message", ""))
    cls: Any = known_errors().get(name) or getattr(builtins, name, None)
    if name in ("StopIteration", "StopAsyncIteration"):  # control flow: no future or coroutine can raise them
        cls = None
    fields = data.get("fields")
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        text = f"{name}: {message}" if message else name
        error: Exception = RemoteError(text, type_name=name)
    else:
        try:
            error = cls(message)
        except TypeError:  # e.g. UnicodeDecodeError needs five arguments
            error = RemoteError(f"{name}: {message}", type_name=name)
        for key in getattr(cls, "fields", ()):
            if isinstance(fields, dict) and key in fields:
                setattr(error, key, fields[key])
    if data.get("traceback"):
        error.__cause__ = RemoteTraceback(data["traceback"])
    return error
