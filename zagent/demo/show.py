"""A trajectory as a person reads it, what was sampled set apart from what was inserted. Pure."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from zagent.types import AgentLoopOutput


def transcript(output: AgentLoopOutput, tokenizer: Any) -> str:
    """Prompt, then runs of sampled (mask 1) and inserted (mask 0) tokens, each with its count."""
    parts = [("prompt", [int(token) for token in output.prompt_ids])]
    tokens = zip(output.response_mask, output.response_ids, strict=True)
    for sampled, run in groupby(tokens, key=lambda pair: int(pair[0])):
        parts.append(("sampled" if sampled else "inserted", [int(token) for _, token in run]))
    return "\n".join(_block(kind, ids, tokenizer) for kind, ids in parts)


def _block(kind: str, ids: list[int], tokenizer: Any) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    head = f"{kind} {len(ids)}"
    return "\n".join(f"{head if first else '':>14} │ {line}" for first, line in _numbered(text))


def _numbered(text: str) -> list[tuple[bool, str]]:
    return [(number == 0, line) for number, line in enumerate(text.replace("\n", "↵\n").split("\n"))]
