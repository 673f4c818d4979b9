"""What both sides of the comparison carry: cases, prompts, rounds and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Call

VOCABULARY = 32_000
#: Prompt ids lie below: the last ones, and the end token, take the simulated engine a detour that no socket takes.
IDS = range(3, 30_000)


@dataclass(frozen=True)
class Case:
    """One kind of call: tokens in, tokens out, and whether the caller has lists of ints or int32 arrays."""

    prompt: int
    response: int
    as_lists: bool

    def __str__(self) -> str:
        return f"{self.prompt}/{self.response} {'lists' if self.as_lists else 'arrays'}"


@dataclass(frozen=True)
class Round:
    """What one caller process does: ``calls`` calls, ``in_flight`` at once, over ``way`` (`zagent` or `sockets`)."""

    way: str
    case: Case
    calls: int
    in_flight: int
    seed: int


@dataclass
class Result:
    """Monotonic times in s (one clock for all processes of a host), and the caller's processor time in between, in s;
    ``wrong`` counts replies with a wrong token."""

    start: float
    end: float
    cpu: float
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0


def sampling_params(case: Case) -> dict[str, Any]:
    return {"max_new_tokens": case.response, "temperature": 1.0, "logprobs": True}


def prompts(round_: Round) -> list[Any]:
    """Distinct prompts, one a call, in the case's form."""
    shape = (round_.calls, round_.case.prompt)
    ids = np.random.default_rng(round_.seed).integers(IDS.start, IDS.stop, shape, np.int32)
    return ids.tolist() if round_.case.as_lists else list(ids)


def header_bytes(case: Case, session: str) -> int:
    """Bytes of a call that are no token ids: zagent's header and the skeleton of its body."""
    header = encode_header(Call(bytes(16), 1, "engine", "generate", session, -1, "", 1))
    skeleton = encode_body([np.zeros(case.prompt, np.int32), sampling_params(case), None, None])[0]
    return len(header) + len(skeleton)
