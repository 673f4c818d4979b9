"""What every peer carries: calls of one size and form, so many at a time, and the servers' trivial answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 32_000
#: Ids of prompts: every answer's are in the vocabulary, too.
IDS = range(3, 30_000)

#: Of the main table.
CALLERS, SERVERS, IN_FLIGHT = 2, 2, 64


@dataclass(frozen=True)
class Case:
    """One kind of call: tokens in, tokens out, and whether the caller has lists of ints or int32 arrays."""

    prompt: int
    response: int
    as_lists: bool

    def __str__(self) -> str:
        return f"{self.prompt}/{self.response} {'lists' if self.as_lists else 'arrays'}"


@dataclass(frozen=True)
class Load:
    """A case, by how many callers, how many calls of each at a time, on how many servers."""

    case: Case
    callers: int = CALLERS
    in_flight: int = IN_FLIGHT
    servers: int = SERVERS

    def __str__(self) -> str:
        """What differs from the main table's load is named."""
        if (self.callers, self.in_flight) == (1, 1):
            return f"{self.case}, one at a time"
        parts = [
            f"{number} {name}{'s' * (name != 'in flight' and number != 1)}"
            for name, number, usual in (
                ("in flight", self.in_flight, IN_FLIGHT),
                ("caller", self.callers, CALLERS),
                ("server", self.servers, SERVERS),
            )
            if number != usual
        ]
        return ", ".join([str(self.case), *parts])


@dataclass(frozen=True)
class Round:
    """What one caller does: ``calls`` calls, ``in_flight`` at once; another seed, other prompts and sessions."""

    case: Case
    calls: int
    in_flight: int
    seed: int

    def session(self, number: int) -> str:
        """Of the call with that number: each has its own."""
        return f"session-{self.seed}-{number}"


@dataclass(frozen=True)
class Timing:
    """Of one caller's round. Monotonic times in s (one clock for all processes of a host), processor time in between,
    seconds each call took; and which process that was."""

    start: float
    end: float
    cpu: float
    latencies: list[float]
    pid: int


def prompts(round_: Round) -> list[Any]:
    """Distinct prompts, one a call, in the case's form."""
    shape = (round_.calls, round_.case.prompt)
    ids = np.random.default_rng(round_.seed).integers(IDS.start, IDS.stop, shape, np.int32)
    return ids.tolist() if round_.case.as_lists else list(ids)


def sampling_params(case: Case) -> dict[str, Any]:
    return {"max_new_tokens": case.response, "temperature": 1.0, "logprobs": True}


def answer(prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The servers' rule: each id of the prompt's beginning plus one, and minus that as log-probability."""
    ids = prompt[:count] + np.int32(1)
    return ids, np.negative(ids, dtype=np.float32)


def list_answer(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The same rule of servers that are sent lists, without a detour over arrays."""
    ids = [token + 1 for token in prompt[:count]]
    return ids, [float(-token) for token in ids]


def wrong_replies(round_: Round, given: list[Any], replies: list[Any]) -> int:
    """Replies of the wrong form, or with an id or log-probability other than the rule says."""
    kind = list if round_.case.as_lists else np.ndarray
    return sum(
        not _right(kind, round_.case.response, prompt, reply) for prompt, reply in zip(given, replies, strict=True)
    )


def _right(kind: type, count: int, prompt: Any, reply: Any) -> bool:
    wanted = answer(np.asarray(prompt, np.int32), count)
    return all(
        isinstance(got, kind) and np.array_equal(np.asarray(got, want.dtype), want)
        for got, want in zip(reply, wanted, strict=True)
    )
