"""The peer of `collate`: padding as verl's agent loop does it (`_agent_loop_postprocess` and `_postprocess`, August
2026). Each row by itself: the prompt is padded on the left by `tokenizer.pad`, the response and its mask on the right,
log-probabilities as a list with zeros; then every tensor of the batch is a `torch.cat` of the rows'.

Left out of it, in its favour: pydantic models of the padded rows, columns that are no tensors, timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zagent.types import AgentLoopOutput


def per_row(
    outputs: Sequence[AgentLoopOutput], tokenizer: Any, prompt_length: int, response_length: int
) -> dict[str, torch.Tensor]:
    """Tensors by name, as `zagent.collate` names them. Responses are cut to their width by whoever made the rows."""
    rows = [padded(output, tokenizer, prompt_length, response_length) for output in outputs]
    batch = {name: torch.cat([row[name] for row in rows], dim=0) for name in rows[0]}
    batch["rm_scores"] = rm_scores([output.reward_score for output in outputs], batch, prompt_length)
    return batch


def padded(
    output: AgentLoopOutput, tokenizer: Any, prompt_length: int, response_length: int
) -> dict[str, torch.Tensor]:
    """One row's tensors, [1, width]."""
    prompt = pad(tokenizer, output.prompt_ids, prompt_length, "left")
    response = pad(tokenizer, output.response_ids, response_length, "right")
    mask = pad(tokenizer, output.response_mask, response_length, "right", attention_mask=False)
    rest = [0.0] * (response_length - len(output.response_logprobs))
    attention_mask = torch.cat([prompt["attention_mask"], response["attention_mask"]], dim=1)
    return {
        "prompts": prompt["input_ids"],
        "responses": response["input_ids"],
        "response_mask": mask["input_ids"] * response["attention_mask"],
        "input_ids": torch.cat([prompt["input_ids"], response["input_ids"]], dim=1),
        "attention_mask": attention_mask,
        "position_ids": torch.clip(torch.cumsum(attention_mask, dim=-1) - 1, min=0, max=None),
        "rollout_log_probs": torch.tensor(output.response_logprobs + rest).unsqueeze(0),
    }


def pad(
    tokenizer: Any, ids: Sequence[int], length: int, side: str, *, attention_mask: bool = True
) -> dict[str, torch.Tensor]:
    """`input_ids` and, if asked for, `attention_mask`, each [1, length]."""
    tokenizer.padding_side = side
    padded = tokenizer.pad(
        {"input_ids": ids},
        padding="max_length",
        max_length=length,
        return_tensors="pt",
        return_attention_mask=attention_mask,
    )
    return {name: tensor.unsqueeze(0) for name, tensor in padded.items()}


def rm_scores(scores: Sequence[float | None], batch: dict[str, torch.Tensor], prompt_length: int) -> torch.Tensor:
    """[B, R]: each row's score at its last token."""
    last = batch["attention_mask"][:, prompt_length:].sum(dim=1) - 1
    made = torch.zeros_like(batch["response_mask"], dtype=torch.float32)
    made[torch.arange(len(scores)), last] = torch.tensor(scores, dtype=torch.float32)
    return made
