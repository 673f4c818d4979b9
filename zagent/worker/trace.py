"""What happens in a trajectory, event by event, for whoever wants to look at it."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zagent.config import TraceConfig
from zagent.errors import ConfigError
from zagent.jsonl import json_line
from zagent.loops.imports import find_object, why
from zagent.loops.limited import limited
from zagent.loops.registry import accepted
from zagent.loops.tokenizer import in_tokenizer_thread
from zagent.types import Ids, TokenOutput

logger = logging.getLogger(__name__)

#: Seconds that a tracer's `close` may take; the launcher kills what does not end.
CLOSE_S = 2.0


class Tracer(Protocol):
    """Receives the events of all trajectories of one worker. `trace.target` names the class; its constructor gets
    `trace.args`, and the worker's name if it has a parameter ``worker``. An ``async def close(self)``, if there is one,
    is called when the worker stops.

    Every event has `kind`, `time` (seconds since 1970), `trajectory` (`{step, sample_index, rollout_n, validate}`),
    `uid`, `sample`, `attempt`, `session` (hex, unique to the attempt) and `worker`. Kinds, and what they have beside:

    * `start`: `agent`, `sampling_params`
    * `generate`, one per engine call: `call` (0, 1, …), `request` (its session), `seconds`, `prompt_tokens`,
      `response_tokens`, `cached_tokens`, `stop_reason`, `prompt_ids`, `response_ids`, with `trace.token2text` also
      `prompt_text`, `response_text` (special tokens included); or `error`
    * `tool`, one per tool call: `name`, `arguments` (as the model wrote them), `text`, `ok`, `seconds`
    * `reward`: `score`, `info`, `error`, `seconds`
    * `end`, always the last: `status` (also `cancelled`), `error`, `num_turns`, `reward_score`, `metrics`
    * whatever a loop emits: ``self.trace(kind, **fields)``
    """

    def event(self, event: dict[str, Any]) -> None:
        """Take one event. Called on the event loop that runs all trajectories of the worker: return soon. What it
        raises is logged, once per kind, and hurts no trajectory."""


class JsonlTracer:
    """One JSON object per line, appended to the file ``path``, in which `{worker}` and `{pid}` are replaced.

    Each line is with the operating system when `event` returns, so that a killed worker leaves all its events; it is
    one write, so that several workers may share a file. NaN is null; what JSON cannot say is its repr.
    """

    def __init__(self, path: str, worker: str = "") -> None:
        self.path = Path(path.replace("{worker}", worker).replace("{pid}", str(os.getpid())))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def event(self, event: Mapping[str, Any]) -> None:
        """Append one line. Raises `OSError` (a full disk)."""
        self._file.write(json_line(event).encode("utf-8", "backslashreplace"))

    async def close(self) -> None:
        """Close the file."""
        self._file.close()


def load_tracer(config: TraceConfig, worker: str) -> Tracer | None:
    """The tracer that `trace.target` names; None where it names none.

    Raises:
        ConfigError: it cannot be imported or made, or has no plain method `event`.
    """
    if config.target is None:
        return None
    factory = find_object("trace.target", config.target)
    try:
        tracer = factory(**{**accepted(factory, {"worker": worker}), **config.args})
    except (Exception, SystemExit) as error:  # whatever the user's constructor raises
        raise ConfigError(f"trace.target={config.target!r} with trace.args={config.args}: {why(error)}") from error
    event = getattr(tracer, "event", None)
    if not callable(event) or inspect.iscoroutinefunction(event):
        raise ConfigError(f"trace.target={config.target!r}: a tracer needs a plain (not async) method `event(event)`")
    return tracer  # type: ignore[no-any-return]


class Tracing:
    """A worker's tracer and what it is told; an error of its own hurts nobody else."""

    def __init__(self, tracer: Tracer, worker: str, tokenizer: Any, *, token2text: bool) -> None:
        self.worker = worker
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._token2text = token2text
        self._failed: set[str] = set()

    @classmethod
    def load(cls, config: TraceConfig, worker: str, tokenizer: Any) -> Tracing | None:
        """As ``config`` says; None where it names no tracer. Raises `ConfigError` (`load_tracer`)."""
        tracer = load_tracer(config, worker)
        return None if tracer is None else cls(tracer, worker, tokenizer, token2text=config.token2text)

    def tell(self, event: dict[str, Any]) -> None:
        """Hand on one event."""
        try:
            self._tracer.event(event)
        except BaseException as error:  # a CancelledError would pass for the caller's own
            self._complain(str(event["kind"]), error)

    async def texts(self, prompt_ids: list[int], response_ids: list[int]) -> dict[str, str]:
        """`prompt_text` and `response_text`, decoded in the tokenizer thread; nothing without `trace.token2text`."""
        if not self._token2text:
            return {}

        def decode() -> dict[str, str]:
            pairs = (("prompt_text", prompt_ids), ("response_text", response_ids))
            return {key: str(self._tokenizer.decode(ids, skip_special_tokens=False)) for key, ids in pairs}

        try:
            return await in_tokenizer_thread(decode)
        except Exception as error:
            self._complain("generate", error)
            return {}

    async def close(self) -> None:
        """Close the tracer, if it can be closed."""
        close = getattr(self._tracer, "close", None)
        try:
            closing = close() if callable(close) else None
            if inspect.isawaitable(closing):
                await limited(closing, CLOSE_S, "the tracer's close")
        except Exception:
            logger.exception("the tracer cannot be closed")

    def _complain(self, kind: str, error: BaseException) -> None:
        if kind not in self._failed:
            self._failed.add(kind)
            logger.error("the tracer fails at %r events; more of them are not reported", kind, exc_info=error)


class RowTrace:
    """Tells of one attempt at one row: ``trace(kind, **fields)``. Silent after `end`."""

    def __init__(self, tracing: Tracing, row: Mapping[str, Any], attempt: int, session: str) -> None:
        self._tracing = tracing
        self._about = {
            "trajectory": row["trajectory"],
            "uid": row["uid"],
            "sample": row["sample"],
            "attempt": attempt,
            "session": session,
            "worker": tracing.worker,
        }
        self._ended = False

    def __call__(self, kind: str, /, **fields: Any) -> None:
        if not self._ended:
            self._ended = kind == "end"
            head = {"kind": kind, "time": time.time(), **self._about}
            self._tracing.tell({**head, **fields, **head})

    async def generated(self, call: int, request: str, prompt: Ids, output: TokenOutput, seconds: float) -> None:
        """An engine call has been answered."""
        prompt_ids, response_ids = [int(token) for token in prompt], [int(token) for token in output.token_ids]
        self(
            "generate",
            call=call,
            request=request,
            seconds=seconds,
            prompt_tokens=len(prompt_ids),
            response_tokens=len(response_ids),
            cached_tokens=output.cached_tokens,
            stop_reason=output.stop_reason,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            **await self._tracing.texts(prompt_ids, response_ids),
        )


def named(error: BaseException) -> str:
    """``error`` as events have it."""
    return f"{type(error).__name__}: {error}"


def silent(kind: str, /, **fields: Any) -> None:
    """``loop.trace`` where nobody listens."""
