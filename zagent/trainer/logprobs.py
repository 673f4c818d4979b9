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
#: Tensors of generated rows that a model is asked about.
NEEDED = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")


def response_logprobs(model: Any, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / temperature) of each response token under ``model``, a causal model of transformers in
    evaluation mode; float32 [B, R] on the CPU, 0 on padding.

    Raises:
        InputError: what is no model, or has a vocabulary without some of the batch's tokens; a batch without the
            tensors of generated rows, or with images.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"a model is a torch.nn.Module (or the log-probabilities themselves, a torch.Tensor), got "
            f"{type(model).__name__}"
        )
    if missing := [key for key in NEEDED if key not in batch.batch]:
        raise InputError(f"the batch has no {', '.join(missing)}: it is none that was generated")
    if batch.batch["position_ids"].ndim != 2:
        raise InputError("rows with images: give the trainer's own log-probabilities instead of a model")
    _check_vocabulary(model, batch.batch["input_ids"])
    with torch.no_grad(), _evaluating(model):
        parts = [
            _logprobs(model, batch[start : start + ROWS_AT_ONCE], temperature)
            for start in range(0, len(batch), ROWS_AT_ONCE)
        ]
    return torch.cat(parts) if parts else torch.zeros(batch.batch["responses"].shape)


def _check_vocabulary(model: Any, ids: torch.Tensor) -> None:
    """Before a lookup fails without a word of which, or on a GPU takes all of CUDA with it."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    known: int | None = getattr(embeddings, "num_embeddings", None)  # the weight itself may be sharded
    if known is not None and ids.numel() and (largest := int(ids.max())) >= known:
        raise InputError(f"the batch has token {largest}, the model knows {known}: it is another model's batch")


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
