"""The outcomes of a batch job: one strict JSON object a line, written as they come."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from zagent.errors import InputError
from zagent.jsonl import json_line
from zagent.types import MULTI_MODAL_INPUTS, AgentLoopOutput, Outcome

#: Keys of an outcome line that zagent writes; what was passed through stands beside them.
OWN_KEYS = (
    "uid", "sample", "status", "error", "attempt", "messages", "prompt_ids", "response_ids", "response_mask",
    "response_logprobs", "versions", "num_turns", "reward_score", "reward_extra_info", "metrics", "extra_fields",
)  # fmt: skip

#: `extra_fields` that have a key of their own in the line, or no place in it: pixels, 20 MB an image.
_TOLD_ELSEWHERE = frozenset({"messages", "response_text", "rollout_versions", "reward_extra_info", MULTI_MODAL_INPUTS})


class OutcomesFile:
    """Appends outcome lines to ``path``; each is with the operating system when `write` returns, so that a crash
    half-way costs none of them. What the file held before is kept until `begin`.

    Raises:
        InputError: the file cannot be written, or is the prompts file.
    """

    def __init__(self, path: Path, prompts: Path | None = None) -> None:
        self.path = path
        self.lines = 0
        try:
            self._was_there = path.exists()
            if prompts is not None and self._was_there and path.samefile(prompts):
                raise InputError(f"{path} is the prompts file: outcomes need a file of their own")
            # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: inside a JSON string that is its escape.
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as error:
            raise InputError(f"outcomes file {path} cannot be written: {error.strerror or error}") from error

    def begin(self) -> None:
        """The work starts: forget an earlier run's outcomes."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)
        self._was_there = True

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. Raises `OSError` naming the file if it cannot be written (a full disk)."""
        text = json_line(line)
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, after {self.lines} outcomes", str(self.path)) from error
        self.lines += 1

    def close(self) -> None:
        """Close the file; one that we made and never began is removed."""
        self._file.close()
        if not self._was_there:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> OutcomesFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After a failed write closing fails as well: the first error has the file's name and the count.
        with contextlib.suppress(OSError) if isinstance(error, OSError) else contextlib.nullcontext():
            self.close()


def outcome_line(
    outcome: Outcome, raw_prompt: Sequence[Mapping[str, Any]], passed: Mapping[str, Any]
) -> dict[str, Any]:
    """One outcome as plain data: every key of `OWN_KEYS` always (None where there is no output), then ``passed``.

    ``versions`` are spans [weight version, start, end) over the sampled tokens of ``response_ids``. ``messages`` are
    the loop's own if it gives them, else the prompt's and the answer's text.
    """
    output = outcome.output
    line: dict[str, Any] = dict.fromkeys(OWN_KEYS)
    line |= {"uid": outcome.uid, "sample": outcome.sample, "status": outcome.status, "attempt": outcome.attempt}
    line["error"] = None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
    line["messages"] = list(raw_prompt) if output is None else _messages(output, raw_prompt)
    if output is not None:
        same = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "num_turns", "reward_score")
        line |= {key: getattr(output, key) for key in same}
        line["versions"] = version_spans(output.extra_fields.get("rollout_versions"))
        line["reward_extra_info"] = output.extra_fields.get("reward_extra_info")
        line["metrics"] = output.metrics.model_dump()
        line["extra_fields"] = {k: v for k, v in output.extra_fields.items() if k not in _TOLD_ELSEWHERE}
    return line | {key: value for key, value in passed.items() if key not in line}


def version_spans(versions: Sequence[int] | np.ndarray | None) -> list[tuple[int, int, int]] | None:
    """Runs of equal versions in a per-token array as (version, start, end); −1 (not sampled) is left out."""
    if versions is None:
        return None
    spans, start = [], 0
    for version, run in itertools.groupby(int(v) for v in versions):
        end = start + sum(1 for _ in run)
        spans += [(version, start, end)] if version >= 0 else []
        start = end
    return spans


def _messages(output: AgentLoopOutput, raw_prompt: Sequence[Mapping[str, Any]]) -> list[Any]:
    given = output.extra_fields.get("messages")
    if given is not None:
        return list(given)
    text = output.extra_fields.get("response_text")
    return [*raw_prompt, *([] if text is None else [{"role": "assistant", "content": text}])]
