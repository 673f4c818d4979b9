"""The engine's log-probabilities beside those of a plain transformers forward over the same ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zagent.types import AgentLoopOutput


def largest_difference(outputs: Sequence[AgentLoopOutput], model_path: str, temperature: float) -> float:
    """Largest absolute difference, in nats, over the sampled tokens of ``outputs``; computed in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return max((_difference(model, output, temperature) for output in outputs), default=0.0)


def _difference(model: object, output: AgentLoopOutput, temperature: float) -> float:
    import torch

    prompt, response = np.asarray(output.prompt_ids), np.asarray(output.response_ids)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1]  # type: ignore[operator]
    log_probs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    ours = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    sampled = np.asarray(output.response_mask) == 1
    return float(np.abs(ours - np.asarray(output.response_logprobs))[sampled].max(initial=0.0))
