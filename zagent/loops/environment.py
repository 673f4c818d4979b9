"""`env_agent`: a game or gym as the other speaker; each answer of the model is an action."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from zagent.errors import InputError, LoopError
from zagent.loops.imports import find_named
from zagent.loops.limited import limited
from zagent.loops.multi_turn import Message, MultiTurnLoop
from zagent.loops.registry import register
from zagent.loops.tools.text import finite, printable
from zagent.loops.tools.threads import call
from zagent.types import AgentLoopOutput

logger = logging.getLogger(__name__)
Made = TypeVar("Made", bound=Callable[..., Any])

_REGISTRY: dict[str, Callable[..., Any]] = {}


class Environment(Protocol):
    """Gymnasium's interface with text: observations are what the model reads, actions what it wrote. Methods may be
    async; plain ones run in a thread. `close()` is optional."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation ("" = the prompt says it all), and info."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answered to an action; ``info["score"]`` at the end replaces the sum of rewards."""

    observation: str
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


def register_env(name: str) -> Callable[[Made], Made]:
    """Decorator of an environment's class or factory: rows may name it ``name``. A later one of the same name wins."""

    def decorate(factory: Made) -> Made:
        _REGISTRY[name] = factory
        return factory

    return decorate


def find_env(name: Any) -> Callable[..., Any]:
    """The environment's factory, by registered name or dotted path. Raises `InputError`, listing the known names."""
    if isinstance(name, str) and name in _REGISTRY:
        return _REGISTRY[name]
    if not isinstance(name, str) or "." not in name:
        raise InputError(
            f"column env: no environment {name!r}; known: {', '.join(sorted(_REGISTRY)) or 'none'}, or a dotted path"
        )
    return find_named(f"environment {name!r}", name, InputError)  # type: ignore[no-any-return]


@register("env_agent")
class EnvAgentLoop(MultiTurnLoop):
    """The row names its environment: columns `env` (registered name or dotted path), `env_kwargs` (for its
    constructor), `env_seed` and `env_options` (for `reset`). Each trajectory has an environment of its own.

    The first observation is added to the prompt's last user message, or follows it as one. `turn_scores` are the steps'
    rewards, `reward_score` their sum (or `info["score"]` of the last step). Ends when the environment does, or at the
    limits of `tool_agent`; a call of the environment takes `multi_turn.tool_timeout` seconds at most.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        env_kwargs = kwargs.get("env_kwargs") or {}
        if not isinstance(env_kwargs, dict):
            raise InputError(f"column env_kwargs must be a map, got {env_kwargs!r:.200}")
        env = await self._call(find_env(kwargs.get("env")), **env_kwargs)
        try:
            return await self._play(env, sampling_params, kwargs)
        finally:
            await self._close(env)

    async def _play(self, env: Any, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        observation = _first(await self._call(env.reset, seed=row.get("env_seed"), options=row.get("env_options")))
        dialogue = await self.open(with_observation(row["raw_prompt"], observation))
        info: dict[str, Any] = {}
        while await self.ask(dialogue, sampling_params):
            action = await self.decode(dialogue.answer.token_ids)
            if dialogue.answer.stop_reason == "abort":
                break
            step = _step(await self._call(env.step, action))
            dialogue.turn_scores.append(step.reward)
            self.trace("env", action=action, observation=step.observation, reward=step.reward, done=step.done)
            info = step.info
            if step.done or self.at_limit(dialogue):
                break
            if not await self.tell(dialogue, [{"role": "user", "content": step.observation}]):
                break
        score = info.get("score", sum(dialogue.turn_scores) if dialogue.turn_scores else None)
        return await self.finish(dialogue, None if score is None else float(score), env_info=info)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        what = f"environment: {getattr(method, '__qualname__', repr(method))}"
        return await limited(call(method, *args, **kwargs), self.rollout_config.multi_turn.tool_timeout, what)

    async def _close(self, env: Any) -> None:
        close = getattr(env, "close", None)
        if close is None:
            return
        try:
            await self._call(close)
        except (Exception, SystemExit):  # the row's outcome is decided
            logger.exception("%s: the environment's close() failed", self.row_name)


def with_observation(messages: list[Message], observation: str) -> list[Message]:
    """``messages`` with the first observation: a new user message, or the end of the last one where that is the user's
    (templates demand alternating roles)."""
    if not observation:
        return messages
    if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        last = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{observation}"}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": observation}]


def _first(given: Any) -> str:
    try:
        observation, _ = given
    except (TypeError, ValueError):
        observation = given
    if not isinstance(observation, str):
        raise LoopError(f"environment: reset must give (text, info), got {given!r:.200}")
    return printable(observation)


def _step(given: Any) -> Step:
    try:
        observation, reward, terminated, truncated, info = given
        if isinstance(observation, str):
            done = bool(terminated) or bool(truncated)
            return Step(printable(observation), finite(reward), done, dict(info or {}))
    except (TypeError, ValueError):
        pass
    raise LoopError(f"environment: step must give (text, reward, terminated, truncated, info), got {given!r:.200}")
