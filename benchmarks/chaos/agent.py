"""The agent loop of the chaos runs, and its tool's own call log: the ledger that zagent has no part in.

Imported in workers by `rollout.imports`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

import zagent

TURNS = 3
#: Tokens of each answer; their speed is the engine's (`benchmarks.chaos.run`).
ANSWER_TOKENS = 24
#: Seconds that a tool call takes.
TOOL_S = 0.05


class Line(NamedTuple):
    """One call of the tool: who called, in which process, when (monotonic s), and a digest of all sampled so far."""

    uid: str
    sample: int
    attempt: int
    turn: int
    pid: int
    at: float
    digest: str


def write_line(ledger: str, line: Line) -> None:
    """Append in one write: whoever is killed has written all of its line or nothing."""
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (" ".join(map(str, line)) + "\n").encode())
    finally:
        os.close(file)


def read_ledger(ledger: str) -> list[Line]:
    """All lines in the order of their writing. Raises `ValueError` at one that is not whole."""
    return [_line(text) for text in Path(ledger).read_text().splitlines()]


def _line(text: str) -> Line:
    uid, sample, attempt, turn, pid, at, digest = text.split()
    return Line(uid, int(sample), int(attempt), int(turn), int(pid), float(at), digest)


@zagent.register("chaos")
class ThreeTurns(zagent.AgentLoopBase):
    """Three answers, and a tool call after each but the last; what the tool says depends on all tokens before it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        prompt = await self.apply_chat_template(row["raw_prompt"])
        session = uuid4().hex
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for turn in range(TURNS):
            params = {**sampling_params, "max_new_tokens": ANSWER_TOKENS}
            answer = await self.server_manager.generate(session, prompt + ids, params)
            ids += answer.token_ids
            mask += [1] * len(answer.token_ids)
            log_probs += answer.log_probs or []
            if turn < TURNS - 1:
                result = await self._tool(row, turn, [*prompt, *ids])
                inserted = await self.continue_chat(answer.token_ids, [{"role": "tool", "content": result}])
                ids += inserted
                mask += [0] * len(inserted)
                log_probs += [0.0] * len(inserted)
        return zagent.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * TURNS,
        )

    async def _tool(self, row: dict[str, Any], turn: int, ids: list[int]) -> str:
        digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]
        line = Line(row["uid"], row["sample"], self.attempt, turn, os.getpid(), time.monotonic(), digest)
        write_line(row["ledger"], line)
        await asyncio.sleep(TOOL_S)
        return digest
