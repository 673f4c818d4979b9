"""What transformers says, in float32, about answers that several versions of the weights have sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

#: Weight version, and the tokens of the response that it sampled: start and end.
Span = tuple[int, int, int]


def other_weights(path: str, seed: int, amount: float = 0.1) -> dict[str, torch.Tensor]:
    """Those at ``path`` in float32, each matrix with noise of that many of its standard deviations. (A head that is the
    embedding is left out.)"""
    chance = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = dict(model.named_parameters())
    noisy = {name: t + amount * t.std() * torch.randn(t.shape, generator=chance) for name, t in tensors.items()}
    return {name: (noisy[name] if tensor.ndim == 2 else tensor).detach() for name, tensor in tensors.items()}


class Versions:
    """One model, with the weights that it started with (version 0) and those that came since."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._models: dict[int, Any] = {0: self._load()}

    def _load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()

    def add(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        model = self._load()
        model.load_state_dict(tensors, strict=False)
        self._models[version] = model

    def greedy(self, version: int, prompt: Sequence[int], tokens: int) -> list[int]:
        made = self._models[version].generate(torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False)
        return list(made[0, len(prompt) :].tolist())

    @torch.no_grad()
    def recomputed(self, prompt: Sequence[int], response: Sequence[int], spans: Sequence[Span]) -> np.ndarray:
        """Log-probability of each token of the response, float32, where each version has gone through all tokens before
        its own: calls that were aborted, and went on from a prompt with what there was."""
        parts = []
        for version, start, end in spans:
            logits = self._models[version](torch.tensor([[*prompt, *response[:end]]])).logits[0]
            parts.append(_chosen(logits[len(prompt) + start - 1 : -1], response[start:end]))
        return np.concatenate(parts)

    @torch.no_grad()
    def continued(self, prompt: Sequence[int], response: Sequence[int], spans: Sequence[Span]) -> np.ndarray:
        """The same where the KV of tokens before is that of the version which went through them: calls that stood
        still, and went on. The last token that a version has sampled goes through the model under the next one."""
        ids, cache, fed, parts = [*prompt, *response], DynamicCache(), 0, []
        for version, start, end in spans:
            until = len(prompt) + end - 1
            logits = self._models[version](torch.tensor([ids[fed:until]]), past_key_values=cache).logits[0]
            parts.append(_chosen(logits[-(end - start) :], response[start:end]))
            fed = until
        return np.concatenate(parts)


def _chosen(logits: torch.Tensor, ids: Sequence[int]) -> np.ndarray:
    steps = torch.log_softmax(logits, dim=-1)
    return np.asarray(steps[torch.arange(len(ids)), torch.tensor(list(ids))], np.float32)


def spans_of(versions: Sequence[int]) -> list[Span]:
    """Of the version of each token."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[start]), start, end) for start, end in pairwise(edges)]
