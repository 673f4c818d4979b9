"""Batches as engines of a tiny random model would have given them: log-probabilities computed row by row, unpadded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zagent.data_proto import DataProto
from zagent.trainer.collate import collate
from zagent.types import AgentLoopOutput, Outcome

VOCABULARY, PROMPT, RESPONSE = 24, 7, 14


def tiny_model(seed: int = 0) -> Any:
    """A Llama of two layers whose answers are far from uniform; the same for the same ``seed``."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        attention_dropout=0.2,
    )
    return LlamaForCausalLM(config).eval()


def after_a_step(model: Any, rate: float = 1e-2) -> Any:
    """A copy of ``model`` moved as an optimizer moves it in one step: every weight by ``rate``, up or down."""
    moved = tiny_model()
    moved.load_state_dict(model.state_dict())
    directions = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(torch.randint(0, 2, weight.shape, generator=directions) * 2 - 1, alpha=rate)
    return moved


def logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log_softmax(logits / temperature) of each response token."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    steps = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return [float(steps[at, token]) for at, token in enumerate(response)]


def outcome(index: int, model: Any, version: int = 0, temperature: float = 1.0) -> Outcome:
    """A row of two turns with a tool's tokens between them, of a length of its own."""
    rng = torch.Generator().manual_seed(1000 + index)
    turns = [int(torch.randint(2, 6, (), generator=rng)) for _ in range(2)]
    mask = [1] * turns[0] + [0] * 3 + [1] * turns[1]
    prompt = torch.randint(0, VOCABULARY, (3 + index % (PROMPT - 2),), generator=rng).tolist()
    response = torch.randint(0, VOCABULARY, (len(mask),), generator=rng).tolist()
    values = logprobs(model, prompt, response, temperature)
    output = AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[value * bit for value, bit in zip(values, mask, strict=True)],
        extra_fields={"rollout_versions": [version if bit else -1 for bit in mask]},
    )
    return Outcome(index, f"row-{index}", 0, "ok", output)


def sampled_batch(engines: Sequence[Any], rows: int = 12, version: int = 0, temperature: float = 1.0) -> DataProto:
    """``rows`` rows; row i is from ``engines[i % len(engines)]``, a model."""
    outcomes = [outcome(i, engines[i % len(engines)], version, temperature) for i in range(rows)]
    return collate(outcomes, prompt_length=PROMPT, response_length=RESPONSE)
