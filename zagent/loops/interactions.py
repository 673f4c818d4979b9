"""Interactions: a simulated user, or an environment that speaks as one (verl's `interactions`)."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from zagent.errors import ConfigError, InputError, LoopError
from zagent.loops.entries import load_entries
from zagent.loops.imports import why
from zagent.loops.limited import limited
from zagent.loops.tools.lifecycle import RELEASE_TIMEOUT_S
from zagent.loops.tools.text import finite, printable
from zagent.loops.tools.threads import call

logger = logging.getLogger(__name__)


class BaseInteraction(ABC):
    """Answers the model as the user. One object per worker; each trajectory is an instance of it, by id.

    Methods may be plain functions (run in a thread), and take `multi_turn.tool_timeout` seconds at most.

    Args:
        config: `config` of its entry, with `name` in it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = str(config["name"])

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """A trajectory begins; ``kwargs`` are the row's `interaction_kwargs`. Its id."""
        return instance_id or uuid4().hex

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Reply to the model's last message.

        Returns:
            Whether the conversation is over (the reply is then not shown to the model), the reply, the score of the
            model's turn, and whatever else shall be known of it.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The whole trajectory's score, asked for at its end; None leaves it to `reward.function`."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027 (a hook)
        """The trajectory is over, however it ended. Called once for each start."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """What an interaction answered."""

    done: bool
    text: str
    score: float

    def message(self) -> dict[str, Any]:
        """As a chat message."""
        return {"role": "user", "content": self.text}


class InteractionRun:
    """One trajectory's interaction, or none (falsy)."""

    def __init__(self, interaction: BaseInteraction | None, kwargs: Mapping[str, Any], timeout: float) -> None:
        """``timeout``: seconds that one of its methods may take."""
        self._interaction = interaction
        self._timeout = timeout
        self._kwargs = dict(kwargs)
        self._id: str | None = None

    def __bool__(self) -> bool:
        return self._interaction is not None

    async def start(self) -> None:
        """Begin, if there is one."""
        if self._interaction is not None:
            self._id = await self._call("start_interaction", uuid4().hex)
            if self._id is None:
                raise LoopError(
                    f"interaction {self._interaction.name!r}: start_interaction must return its instance's id"
                )

    async def reply(self, messages: list[dict[str, Any]]) -> UserReply:
        """Its answer to ``messages``. Raises `LoopError` where it gives anything else than what it should."""
        assert self._interaction is not None and self._id is not None
        given = await self._call("generate_response", self._id, messages)
        try:
            done, text, score, _ = given
            return UserReply(bool(done), _text(text), finite(score))
        except (TypeError, ValueError) as error:
            raise LoopError(
                f"interaction {self._interaction.name!r}: generate_response must give (bool, text, float, dict), "
                f"got {given!r:.200}: {error}"
            ) from error

    async def score(self) -> float | None:
        """The trajectory's score, if the interaction gives one."""
        if self._interaction is None or self._id is None:
            return None
        score: float | None = await self._call("calculate_score", self._id)
        return score

    async def finalize(self) -> None:
        """End what was started; what goes wrong is logged, since the row's outcome is decided."""
        if self._interaction is None or self._id is None:
            return
        try:
            await self._call("finalize_interaction", self._id, timeout=RELEASE_TIMEOUT_S)
        except (Exception, SystemExit):
            logger.exception("interaction %r: finalize_interaction failed", self._interaction.name)

    async def _call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        function = getattr(self._interaction, method)
        what = f"interaction {self._interaction.name!r}: {method}" if self._interaction else method
        limit = self._timeout if timeout is None else timeout
        return await limited(call(function, *args, **self._kwargs), limit, what)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a reply is text")
    return printable(value)


def load_interactions(path: str | os.PathLike[str] | None) -> dict[str, BaseInteraction]:
    """The interactions of a YAML file `interaction: [{name, class_name, config}]`, by name (default: the class's).

    Raises:
        ConfigError: names the file, the entry and what is wrong with it.
    """
    found: dict[str, BaseInteraction] = {}
    key = "rollout.multi_turn.interaction_config_path"
    for number, entry in enumerate(load_entries(path, "interaction", of=key) if path else ()):
        where = f"{key}={os.fspath(path or '')!r}: interaction {number}"
        if "class_name" not in entry:
            raise ConfigError(f"{where} needs class_name, got {entry!r}")
        made = _build(entry, where)
        if made.name in found:
            raise ConfigError(f"{where}: a second one of the name {made.name!r}")
        found[made.name] = made
    return found


def _build(entry: Mapping[str, Any], where: str) -> BaseInteraction:
    from hydra.utils import get_class

    name = str(entry.get("name") or str(entry["class_name"]).rpartition(".")[2])
    try:
        made = get_class(str(entry["class_name"]))({**(entry.get("config") or {}), "name": name})
    except Exception as error:  # whatever the user's module and constructor raise
        raise ConfigError(f"{where} ({name!r}): {why(error)}") from error
    if not isinstance(made, BaseInteraction):
        raise ConfigError(f"{where} ({name!r}): {entry['class_name']} is no zagent.BaseInteraction")
    return made


def choose(
    interactions: Mapping[str, BaseInteraction], row: Mapping[str, Any]
) -> tuple[BaseInteraction | None, dict[str, Any]]:
    """The interaction that ``row`` asks for by `extra_info["interaction_kwargs"]` (or a column of that name), and its
    kwargs but for `name`; the only one configured need not be named. A row without such kwargs has none.

    Raises:
        InputError: an unknown name, or none where there are several; lists the names. Kwargs that are no map.
    """
    asked, extra = row.get("interaction_kwargs"), row.get("extra_info")
    if asked is None and isinstance(extra, Mapping):  # it may be anything in rows without an interaction
        asked = extra.get("interaction_kwargs")
    if asked is None:
        return None, {}
    if not isinstance(asked, Mapping):
        raise InputError(f"interaction_kwargs must be a map, got {asked!r:.200}")
    kwargs = dict(asked)
    name = kwargs.pop("name", None)
    if name is None and len(interactions) == 1:
        return next(iter(interactions.values())), kwargs
    if not isinstance(name, str) or name not in interactions:
        known = ", ".join(sorted(interactions)) or "none (multi_turn.interaction_config_path)"
        raise InputError(f"interaction_kwargs['name']={name!r} is no interaction; known: {known}")
    return interactions[name], kwargs
