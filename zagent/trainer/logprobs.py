"""The trainer's log-probabilities of a batch's responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zagent.data_proto import DataProto
from zagent.errors import InputError

#: Rows in one forward: logits take `rows × tokens × vocabulary` floats.
ROWS_AT_ONCE = 8


def response_logprobs(model: Any, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / temperature) of each response token under ``model``, a causal model of transformers in
    evaluation mode; float32 [B, R] on the CPU, 0 on padding. Raises `InputError` for rows with images."""
    if batch.batch["position_ids"].ndim != 2:
        raise InputError("rows with images: give the trainer's own log-probabilities instead of a model")
    with torch.no_grad(), _evaluating(model):
        parts = [
            _logprobs(model, batch[start : start + ROWS_AT_ONCE], temperature)
            for start in range(0, len(batch), ROWS_AT_ONCE)
        ]
    return torch.cat(parts) if parts else torch.zeros(batch.batch["responses"].shape)


def _logprobs(model: Any, rows: DataProto, temperature: float) -> torch.Tensor:
    real = rows.batch["attention_mask"].any(dim=0).nonzero()[:, 0]
    result = torch.zeros(rows.batch["responses"].shape)
    if not len(real):  # failed rows
        return result
    used = slice(int(real[0]), int(real[-1]) + 1)  # no time for columns that are padding in every row
    device = next(model.parameters()).device
    given = {key: rows.batch[key][:, used].to(device) for key in ("input_ids", "attention_mask", "position_ids")}
    prompt = rows.batch["prompts"].shape[1] - used.start
    logits = model(**given, use_cache=False).logits[:, prompt - 1 : -1].float() / temperature
    targets = given["input_ids"][:, prompt:, None]
    logprobs = logits.gather(2, targets)[..., 0] - logits.logsumexp(dim=2)
    padding = given["attention_mask"][:, prompt:] == 0  # in a row that is nothing else, NaN
    result[:, : logprobs.shape[1]] = logprobs.masked_fill(padding, 0.0).cpu()
    return result


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
