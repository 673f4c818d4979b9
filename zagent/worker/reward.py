"""`reward.function`: each row's score, as soon as its loop has ended."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zagent.config import RewardConfig
from zagent.errors import ConfigError, RewardError
from zagent.loops.imports import find_object
from zagent.loops.limited import limited
from zagent.loops.threads import Threads
from zagent.types import RESERVED_COLUMNS, AgentLoopOutput
from zagent.wire.codec import decode_body, encode_body
from zagent.worker.checks import finite_score
from zagent.worker.trace import named

#: Keyword arguments on offer: verl's four, and more for functions that name them.
OFFERED = (
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("messages", "trajectory", "output", "services", "attempt"),
)
#: Characters of an answer that errors quote; the log has it whole.
QUOTED = 400


@dataclass(frozen=True, slots=True)
class Finished:
    """A row whose loop has ended: ``kwargs`` are its columns, ``text`` is its response without special tokens."""

    kwargs: Mapping[str, Any]
    trajectory: Mapping[str, Any]
    output: AgentLoopOutput
    text: str
    services: Any = None
    attempt: int = 1

    def extra_info(self) -> dict[str, Any]:
        """verl's: the row's `extra_info`, over it the loop's `extra_fields` (tool rewards, turn scores …), `num_turns`
        and `rollout_reward_scores`."""
        own = {"num_turns": self.output.num_turns, "rollout_reward_scores": self.kwargs.get("reward_scores") or {}}
        return {**(self.kwargs.get("extra_info") or {}), **self.output.extra_fields, **own}

    def messages(self) -> list[Any]:
        """The conversation: the loop's own record if it gives one, else prompt and response."""
        given = self.output.extra_fields.get("messages")
        if given is not None:
            return list(given)
        return [*self.kwargs["raw_prompt"], {"role": "assistant", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Scored:
    """``info`` joins the row's `reward_extra_info`. Where ``error`` is set there is no score."""

    score: float | None
    info: dict[str, Any] = field(default_factory=dict)
    error: RewardError | None = None


class Reward:
    """Calls the user's function, which may be synchronous (run in a thread) or async.

    It is given those of `OFFERED` that it has parameters for, as keywords, and `reward.kwargs`:

    * `data_source`: the row's column, or None
    * `solution_str`: the response as text, tool results and all, without special tokens
    * `ground_truth`: `reward_model["ground_truth"]` of the row. Where the row has none, the parameter's default; a
      function without a default cannot score that row
    * `extra_info`: `Finished.extra_info`
    * `messages`, `trajectory` (`{step, sample_index, rollout_n, validate}`), `output` (the `AgentLoopOutput`; look, do
      not change), `services` (user actors by pool name), `attempt` (`AgentLoopBase.attempt`)

    Dicts and lists are copies. It gives a number, or a dict with `score`, whose other keys become the row's
    `reward_extra_info`; they may be none of `zagent.types.RESERVED_COLUMNS`.

    Raises:
        ConfigError: the function has a parameter that nothing is offered for, or none for one of `reward.kwargs`.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Any], threads: Threads | None = None) -> None:
        self._config = config
        self._function = function
        self._name = f"reward function {config.function!r}"
        self._parameters = _parameters(config, function)
        self._threads = threads or Threads()

    @classmethod
    def load(cls, config: RewardConfig) -> Reward | None:
        """The function that ``config`` names; None where it names none. Raises `ConfigError`."""
        if config.function is None:
            return None
        found = find_object("reward.function", config.function)
        if isinstance(found, type):
            raise ConfigError(f"reward.function={config.function!r} is a class; a function is needed")
        return cls(config, found)

    @property
    def needed(self) -> bool:
        """A row without a score has failed (`reward.on_error=fail`)."""
        return self._config.on_error == "fail"

    async def score(self, finished: Finished) -> Scored:
        """The score of ``finished``; or the error, also as `reward_error` among the infos, which names the function and
        quotes the answer: it raised, took longer than `reward.timeout_s` or gave no finite number, or the row lacks
        what it needs."""
        try:
            return self._read(await self._call(self._keywords(finished)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in it, or a Rust library's panic, must not end the worker
            said = f"{self._name} {error}" if isinstance(error, _Unusable) else f"{self._name}: {named(error)}"
            answer = finished.text if len(finished.text) <= QUOTED else finished.text[:QUOTED] + "…"
            failure = RewardError(f"{said}; the answer was {answer!r}")
            failure.__cause__ = error
            return Scored(None, {"reward_error": said}, failure)

    def _keywords(self, finished: Finished) -> dict[str, Any]:
        made: dict[str, Callable[[], Any]] = {
            "data_source": lambda: finished.kwargs.get("data_source"),
            "solution_str": lambda: finished.text,
            "extra_info": lambda: copy.deepcopy(finished.extra_info()),
            "messages": lambda: copy.deepcopy(finished.messages()),
            "trajectory": lambda: dict(finished.trajectory),
            "output": finished.output.model_copy,
            "services": lambda: finished.services,
            "attempt": lambda: finished.attempt,
        }
        keywords = {name: make() for name, make in made.items() if name in self._parameters}
        return {**keywords, **self._ground_truth(finished.kwargs), **self._config.kwargs}

    def _ground_truth(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "ground_truth" not in self._parameters:
            return {}
        column = row.get("reward_model")
        if isinstance(column, Mapping) and "ground_truth" in column:
            return {"ground_truth": copy.deepcopy(column["ground_truth"])}
        if self._parameters["ground_truth"]:
            return {}
        raise _Unusable(f"needs reward_model['ground_truth'], and the row's reward_model is {column!r:.80}")

    async def _call(self, keywords: Mapping[str, Any]) -> Any:
        limit = self._config.timeout_s
        if _is_async(self._function):
            given = self._function(**keywords)
        else:
            given = await self._threads.run(partial(self._function, **keywords), limit)
        return await limited(given, limit, "the call") if inspect.isawaitable(given) else given

    @staticmethod
    def _read(given: Any) -> Scored:
        if not isinstance(given, Mapping):
            return Scored(_score(given))
        if "score" not in given:
            raise _Unusable(f"gave a dict without 'score' (keys: {', '.join(map(str, given)) or 'none'})")
        info = {key: value for key, value in given.items() if key != "score"}
        odd = [key for key in info if not isinstance(key, str)]
        if odd:
            raise _Unusable(f"gave a dict with a key that is no text: {odd[0]!r}")
        taken = [key for key in RESERVED_COLUMNS if key in info]
        if taken:
            raise _Unusable(f"gave a dict with {taken[0]!r}, which is the row's own column")
        decode_body(encode_body(info))  # what cannot travel, or arrive, is this function's fault, not the loop's
        return Scored(_score(given["score"]), info)


class _Unusable(Exception):
    """What the function needs and has not, or gave and should not have; a half sentence about it."""


def _score(given: Any) -> float:
    try:
        return finite_score(given)
    except ValueError as error:
        raise _Unusable(f"gave no score: {error}") from error


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _parameters(config: RewardConfig, function: Callable[..., Any]) -> dict[str, bool]:
    """Which of `OFFERED` the function takes, and whether it can do without."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C say nothing about themselves
        return dict.fromkeys(OFFERED[:4], False)
    known = signature.parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    taken = {
        name: name not in known or known[name].default is not inspect.Parameter.empty
        for name in OFFERED
        if takes_all or name in known
    }
    try:
        signature.bind(**dict.fromkeys([*taken, *config.kwargs]))
    except TypeError as error:
        offered = ", ".join(dict.fromkeys([*OFFERED, *config.kwargs]))
        raise ConfigError(f"reward.function={config.function!r}: {error}; the keywords are {offered}") from error
    return taken
