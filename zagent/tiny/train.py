"""Train the tiny tool model from scratch on a CPU: ``python -m zagent.tiny.train --out DIR``.

Writes `DIR/final` and, from an early step of the same run, `DIR/early`; 22 minutes on two busy cores, and torch 2.9 or
later, which has Muon. The same seed, number of threads and machine give the same weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from zagent.tiny import tokenizer as tiny_tokenizer
from zagent.tiny.arithmetic import questions
from zagent.tiny.conversations import Conversation, conversations
from zagent.tiny.evaluation import play, score, true_tool, wrong_tool

STEPS, EARLY_STEP, SEED = 1500, 400, 0
#: Conversations in a batch; batches made at once, so that each holds conversations of about one length.
BATCH, POOL = 32, 16
#: Longer conversations, in tokens, are left out: attention's time grows with the square.
LONGEST = 640
#: Lengths are multiples of it: for each new shape of a matrix the CPU library compiles a kernel, and keeps it.
LENGTH_STEP = 32
#: Of matrices (Muon, which learns to copy numbers in 200 steps; AdamW had not begun to after 500), and of the rest.
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
WARM_UP, DECAY = 30, 0.6
#: In the first steps few dialogues list tools: they are half as long, and copying is learnt as well from them.
SHORT_SHARE = 0.2
#: Seed of the held-out questions; training seeds are 48 random bits.
HELD_OUT = 10**6

IGNORED = -100


def new_model(vocabulary: int) -> Any:
    """A Llama of 0.89 million parameters with random weights."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    end, pad = vocabulary_ids(tiny_tokenizer.END, tiny_tokenizer.PAD)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-vocabulary // 16) * 16,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,  # of 64: some GPU kernels take no smaller head, and two train faster than four of 32
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def vocabulary_ids(*tokens: str) -> list[int]:
    return list(tiny_tokenizer.build().convert_tokens_to_ids(tokens))


def labelled(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids and labels, of one length; labels are the ids of what the assistant says, end tokens included, else -100."""
    text = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    ids, opening = tokenizer.encode(text), tokenizer.encode("<|im_start|>assistant\n")
    labels = [IGNORED] * len(ids)
    for at in range(len(opening), len(ids)):
        if ids[at - len(opening) : at] == opening:
            stop = ids.index(tokenizer.eos_token_id, at) + 1
            labels[at:stop] = ids[at:stop]
    return ids, labels


def batches(tokenizer: Any, source: Iterator[Conversation], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: ids and labels, int64 [BATCH, length], padded on the right."""
    order = torch.Generator().manual_seed(seed)
    while True:
        made = (labelled(tokenizer, one) for one in source)
        pool = sorted(
            islice((one for one in made if len(one[0]) <= LONGEST), BATCH * POOL), key=lambda one: len(one[0])
        )
        for at in torch.randperm(POOL, generator=order).tolist():
            rows = pool[at * BATCH : (at + 1) * BATCH]
            yield _padded([ids for ids, _ in rows], tokenizer.pad_token_id), _padded([one for _, one in rows], IGNORED)


def _padded(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
    longest = -(-max(len(row) for row in rows) // LENGTH_STEP) * LENGTH_STEP
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the labelled tokens, each predicted from those before it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: up, flat, down to nearly nothing."""
    return min((step + 1) / WARM_UP, 1.0, max(steps - step, 0) / (DECAY * steps))


def lessons(tokenizer: Any, steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a run of ``steps`` steps."""
    short = int(SHORT_SHARE * steps)
    yield from islice(batches(tokenizer, conversations(2 * seed, 0.1), seed), short)
    yield from islice(batches(tokenizer, conversations(2 * seed + 1, 0.85), seed), steps - short)


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inside = [one for one in model.model.layers.parameters() if one.ndim == 2]
    chosen = {id(one) for one in inside}
    others = [one for one in model.parameters() if id(one) not in chosen]
    return [
        torch.optim.Muon(inside, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Any, tokenizer: Any, steps: int, seed: int) -> Iterator[tuple[int, float]]:
    """Trains ``model`` in place; yields (steps done, loss) after each step."""
    chosen = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: schedule(step, steps)) for one in chosen]
    for step, batch in enumerate(lessons(tokenizer, steps, seed)):
        loss = loss_of(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(chosen, schedules, strict=True):
            optimizer.step()
            rate.step()
        model.zero_grad()
        yield step + 1, loss.item()


def report(model: Any, tokenizer: Any, count: int, temperatures: Sequence[float] = (0.0, 0.7)) -> str:
    """Lines on ``count`` held-out questions: each temperature with a tool that is right and one that is wrong."""
    asked, lines = questions(HELD_OUT, count), []
    for temperature in temperatures:
        for name, tool in (("true", true_tool), ("wrong", wrong_tool(HELD_OUT))):
            lines.append(f"  T={temperature:g}, {name} tool: {score(play(model, tokenizer, asked, tool, temperature))}")
    return "\n".join(lines)


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Weights in bfloat16, tokenizer and chat template."""
    from copy import deepcopy

    deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zagent.tiny.train", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--early-step", type=int, default=EARLY_STEP)
    parser.add_argument("--candidates", type=int, nargs="*", default=[], help="steps to save as step-N too")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--questions", type=int, default=100, help="held-out questions of one evaluation")
    parser.add_argument("--threads", type=int, default=2)
    run(parser.parse_args(arguments))
    return 0


def run(options: argparse.Namespace) -> None:
    from transformers import utils

    utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = tiny_tokenizer.build()
    model = new_model(len(tokenizer))
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    began, losses = time.monotonic(), []
    for step, loss in train(model, tokenizer, options.steps, options.seed):
        losses.append(loss)
        if step == options.early_step:
            save(model, tokenizer, options.out / "early")
        if step in options.candidates:
            save(model, tokenizer, options.out / f"step-{step}")
        if step % options.every == 0 or step == options.steps:
            recent = losses[-options.every :]
            print(f"step {step}, {time.monotonic() - began:.0f} s, loss {sum(recent) / len(recent):.4f}", flush=True)
            print(report(model, tokenizer, options.questions), flush=True)
    save(model, tokenizer, options.out / "final")


if __name__ == "__main__":
    raise SystemExit(main())
