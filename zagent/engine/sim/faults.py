"""The fault script: which call meets which fault, decided without doing anything about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zagent.errors import ConfigError

Effect = Literal["exit", "kill", "hang", "error", "refuse", "abort"]
TRIGGERS = ("at_call", "every", "at_s", "token")


class Fault(BaseModel):
    """One entry of `engine.sim.faults`; docs/simulated-engine.md explains the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    engine: int | Literal["*"] = "*"
    do: Effect | Literal["slow"]
    at_call: int | None = Field(None, ge=1)
    every: int | None = Field(None, ge=1)
    at_s: float | None = Field(None, ge=0)
    token: int | None = Field(None, ge=0)
    factor: float | None = Field(None, gt=0)
    for_s: float | None = Field(None, gt=0)
    count: int | None = Field(None, ge=1)

    @field_validator("engine", mode="before")
    @classmethod
    def _index(cls, value: Any) -> Any:
        if value != "*" and (type(value) is not int or value < 0):
            raise ValueError("must be the index of an engine, or '*'")
        return value

    @model_validator(mode="after")
    def _check(self) -> Fault:
        triggers = [key for key in TRIGGERS if getattr(self, key) is not None]
        if len(triggers) > 1:
            raise ValueError(f"has more than one trigger: {', '.join(triggers)}")
        if not triggers and self.do != "slow":
            raise ValueError(f"'do: {self.do}' needs one trigger of {', '.join(TRIGGERS)}")
        if (self.factor is None) == (self.do == "slow"):
            raise ValueError("'factor' belongs to 'do: slow', which needs it")
        if self.do in ("exit", "kill") and (self.for_s or self.count):
            raise ValueError(f"'for_s' and 'count' mean nothing with 'do: {self.do}'")
        return self

    @property
    def ends_engine(self) -> bool:
        return self.do in ("exit", "kill")


def parse_faults(script: Iterable[Mapping[str, Any]], vocab_size: int) -> list[Fault]:
    """The script, checked. Raises `ConfigError` naming entry and key."""
    faults = []
    for position, entry in enumerate(script):
        try:
            fault = Fault.model_validate(dict(entry))
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(position, e) for e in error.errors())) from error
        if fault.token is not None and fault.token >= vocab_size:
            raise ConfigError(
                f"engine.sim.faults[{position}].token={fault.token}: outside the vocabulary of {vocab_size}"
            )
        faults.append(fault)
    return faults


def _explain(position: int, error: Mapping[str, Any]) -> str:
    place = f"engine.sim.faults[{position}]"
    key = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, Fault.model_fields, n=1)
        return f"{place}: unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{place}: key {key!r} is missing"
    return f"{place}.{key}={error['input']!r}: {text}" if key else f"{place}: {text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What befalls one call: at most one effect, and a factor on its durations."""

    effect: Effect | None = None
    factor: float = 1.0


HEALTHY = Verdict()


@dataclass(slots=True)
class _Rule:
    fault: Fault
    hits: int = 0
    since: float | None = None

    def strikes(self, call: int, now: float, prompt_ids: np.ndarray) -> bool:
        if not (self._triggered(call, now, prompt_ids) and self._lasts(now)):
            return False
        self.hits += 1
        return True

    def _triggered(self, call: int, now: float, prompt_ids: np.ndarray) -> bool:
        fault = self.fault
        if fault.at_call is not None:
            return call >= fault.at_call
        if fault.every is not None:
            return call % fault.every == 0
        if fault.at_s is not None:
            return now >= fault.at_s
        return fault.token is None or bool((prompt_ids == fault.token).any())

    def _opening(self, now: float) -> float:
        """When `for_s` begins: with `at_s` then, with another trigger at the first call struck, without one at 0."""
        if self.fault.at_s is not None:
            return self.fault.at_s
        return now if any(getattr(self.fault, key) is not None for key in TRIGGERS) else 0.0

    def _lasts(self, now: float) -> bool:
        fault = self.fault
        if self.since is None:
            self.since = self._opening(now)
        if fault.for_s is not None and now >= self.since + fault.for_s:
            return False
        count = 1 if fault.at_call is not None and fault.for_s is None and fault.count is None else fault.count
        return count is None or self.hits < count


class FaultScript:
    """The faults of one engine, with its call counter. Times are seconds since the engine's start."""

    def __init__(self, faults: Iterable[Fault], index: int) -> None:
        mine = [fault for fault in faults if fault.engine in ("*", index)]
        #: Ends that come by the clock, whether or not a call is running: (seconds after the start, what).
        self.timed_ends = [(f.at_s, f.do) for f in mine if f.ends_engine and f.at_s is not None]
        self._rules = [_Rule(fault) for fault in mine if not (fault.ends_engine and fault.at_s is not None)]
        self._calls = 0

    def next_call(self, now: float, prompt_ids: np.ndarray) -> Verdict:
        """Count a call in and say what befalls it; of several effects, the first in the script."""
        self._calls += 1
        if not self._rules:
            return HEALTHY
        effect: Effect | None = None
        factor = 1.0
        for rule in self._rules:
            if not rule.strikes(self._calls, now, prompt_ids):
                continue
            if rule.fault.do == "slow":
                factor *= rule.fault.factor or 1.0
            else:
                effect = effect or rule.fault.do
        return Verdict(effect, factor)
