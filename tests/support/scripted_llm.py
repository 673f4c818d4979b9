"""A server manager whose answers are written beforehand, for tests of loops without engines."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from zagent.types import TokenOutput


@dataclass
class Asked:
    """One engine call as the loop made it. ``prompt`` and ``params`` are the loop's own objects, ``seen`` and ``given``
    what was in them at the time."""

    session: str
    prompt: Any
    params: dict[str, Any]
    seen: list[int]
    given: dict[str, Any]


class ScriptedLLM:
    """Answers with ``answers`` in turn: text (ends with the stop token; a trailing "…" = cut off by length), or a
    `TokenOutput` as it is. Log-probabilities are −1, −2, … over the whole trajectory, so that each is told apart."""

    def __init__(self, tokenizer: Any, *answers: str | TokenOutput) -> None:
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self.sampled: list[int] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        image_data: Sequence[bytes] | None = None,
        video_data: Sequence[bytes] | None = None,
    ) -> TokenOutput:
        seen = [int(token) for token in prompt_ids]
        self.asked.append(Asked(request_id, prompt_ids, sampling_params, seen, deepcopy(sampling_params)))
        answer = self.answers[len(self.asked) - 1]
        output = answer if isinstance(answer, TokenOutput) else self._output(answer)
        self.sampled.extend(int(token) for token in output.token_ids)
        return output

    def _output(self, text: str) -> TokenOutput:
        ids = self.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        if not text.endswith("…"):
            ids.append(self.tokenizer.eos_token_id)
        first = len(self.sampled)
        log_probs = -np.arange(first + 1, first + len(ids) + 1, dtype=np.float32)
        stop_reason = "length" if text.endswith("…") else "stop"
        version = len(self.asked)
        return TokenOutput(np.array(ids, np.int32), log_probs, stop_reason, versions=[(version, 0, len(ids))])
