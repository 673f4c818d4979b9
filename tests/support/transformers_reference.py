"""What transformers says, in float32: the independent judge of tokens and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np


class Reference:
    """A causal model at ``path`` in float32."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def log_probs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> np.ndarray:
        """log_softmax(logits / temperature) of each response token, float32 [tokens]."""
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + response])).logits[0]
        steps = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
        return np.asarray(steps[torch.arange(len(response)), torch.tensor(response)], np.float32)

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The most likely continuation."""
        ids = self._torch.tensor([prompt])
        made = self._model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return list(made[0, len(prompt) :].tolist())
