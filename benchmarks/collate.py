"""From trajectories to padded tensors: `zagent.trainer.collate` against padding row by row with the tokenizer.

Rows of long-tailed lengths, each side in the form in which it has them: zagent's loops hand on int32 and float32
arrays, verl's lists. A case for lists on both sides says what the form is worth. The tensors of both are compared
before anything is timed; torch has one thread, as in any worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing import colour, drawing
from benchmarks.processes import Failed
from benchmarks.suite import Figure, Options, Record, cases, markdown, median, peers, ratios, spread
from zagent.types import AgentLoopOutput, Outcome

NAME = "collate"
PEERS = ("zagent", "tokenizer.pad")
REPEATS = 5
PROMPT_LENGTH = 1024
RESPONSE_LENGTH = 2048
#: Medians of the log-normal lengths; with a sigma of 1 one response in 20 is longer than five times its median.
PROMPT_MEDIAN, RESPONSE_MEDIAN = 256, 400
SHORTEST = 16
VOCABULARY = 32_000


@dataclass(frozen=True)
class Case:
    """So many rows; ``lists``: zagent is given lists, too."""

    rows: int
    lists: bool = False

    def __str__(self) -> str:
        return f"{self.rows} rows{', lists' if self.lists else ''}"


CASES = (Case(64), Case(256), Case(1024), Case(1024, lists=True), Case(4096))
QUICK = (Case(64), Case(64, lists=True))


def run(options: Options, record: Record) -> None:
    """Every case, its peers in turn. Raises `Failed` if their tensors differ."""
    with one_thread():
        for case in QUICK if options.quick else CASES:
            ways = {peer: way for peer, way in _ways(case).items() if peer in options.peers}
            check_equal({peer: way() for peer, way in ways.items()})
            for repeat in range(options.repeats or REPEATS):
                for peer in reversed(ways) if repeat % 2 else ways:
                    wall_s, cpu_s = timed(ways[peer])
                    record(Figure(NAME, str(case), peer, repeat, "rows_per_s", case.rows / wall_s, "1/s"))
                    record(Figure(NAME, str(case), peer, repeat, "cpu_us", cpu_s / case.rows * 1e6, "µs"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operations take one core: several would wait for each other on a machine that is shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ways(case: Case) -> dict[str, Callable[[], dict[str, Any]]]:
    """Peer -> what makes its tensors of one and the same rows."""
    from transformers import PreTrainedTokenizerFast

    from benchmarks.collate_per_row import per_row
    from zagent.models import resolve
    from zagent.trainer.collate import collate

    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("tiny"))
    arrays = outcomes(case.rows, seed=case.rows)
    lists = [as_lists(outcome) for outcome in arrays]
    ours, theirs = lists if case.lists else arrays, [outcome.output for outcome in lists if outcome.output]
    p, r, pad = PROMPT_LENGTH, RESPONSE_LENGTH, tokenizer.pad_token_id
    return {
        "zagent": lambda: collate(ours, prompt_length=p, response_length=r, pad_token_id=pad).batch,
        "tokenizer.pad": lambda: per_row(theirs, tokenizer, p, r),
    }


def outcomes(count: int, seed: int) -> list[Outcome]:
    """Finished rows of arrays, with tool tokens, log-probabilities and rewards."""
    rng = np.random.default_rng(seed)
    return [Outcome(index, str(index), 0, "ok", _output(rng)) for index in range(count)]


def _output(rng: np.random.Generator) -> AgentLoopOutput:
    prompt, response = _length(rng, PROMPT_MEDIAN, PROMPT_LENGTH), _length(rng, RESPONSE_MEDIAN, RESPONSE_LENGTH)
    mask = np.ones(response, np.int32)
    mask[response // 4 : response // 3] = 0  # what a tool said
    return AgentLoopOutput(
        prompt_ids=rng.integers(VOCABULARY, size=prompt, dtype=np.int32),
        response_ids=rng.integers(VOCABULARY, size=response, dtype=np.int32),
        response_mask=mask,
        response_logprobs=-rng.random(response, np.float32) * mask,
        reward_score=float(rng.integers(2)),
        num_turns=4,
    )


def _length(rng: np.random.Generator, middle: int, longest: int) -> int:
    return int(np.clip(rng.lognormal(np.log(middle), 1.0), SHORTEST, longest))


def as_lists(outcome: Outcome) -> Outcome:
    """The same row with Python lists."""
    output = outcome.output
    assert output is not None
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    lists = {name: getattr(output, name).tolist() for name in names}
    changed = AgentLoopOutput(**lists, reward_score=output.reward_score, num_turns=output.num_turns)
    return Outcome(outcome.index, outcome.uid, outcome.sample, outcome.status, changed)


def check_equal(made: dict[str, dict[str, Any]]) -> None:
    """Every peer's tensors against those of the same name that zagent makes: values, shape and dtype. Raises `Failed`,
    naming the tensor."""
    import torch

    ours = made["zagent"]
    for peer, tensors in made.items():
        for name, tensor in tensors.items():
            if tensor.dtype != ours[name].dtype or not torch.equal(tensor, ours[name]):
                raise Failed(f"{peer} and zagent differ in {name}")


def timed(way: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call, by the clock and of the processor. What it made is let go after that."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = way()
    passed = time.perf_counter() - wall, time.process_time() - cpu
    del made
    return passed


def table(figures: Sequence[Figure]) -> str:
    """Rows per second, processor time a row, and the ratio by the clock."""
    others = [peer for peer in peers(figures) if peer != "zagent"]
    head = ["", "zagent rows/s", "CPU µs a row"]
    for peer in others:
        head += [f"{peer} rows/s", "CPU µs a row", f"zagent / {peer}"]
    return markdown(head, [[case, *_cells(figures, case, others)] for case in cases(figures)])


def _cells(figures: Sequence[Figure], case: str, others: Sequence[str]) -> list[str]:
    cells = []
    for peer in ("zagent", *others):
        speed = median(figures, case=case, peer=peer, name="rows_per_s")
        cells += [f"{speed:,.0f}", f"{median(figures, case=case, peer=peer, name='cpu_us'):,.0f}"]
        if peer != "zagent":
            cells.append(spread(ratios(figures, case=case, name="rows_per_s", under=peer), ".1f"))
    return cells


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Rows per second against rows."""
    file = directory / "collate.png"
    found = [case for case in cases(figures) if not case.endswith("lists")]
    sizes = [int(case.split()[0]) for case in found]
    with drawing(file, title="Padding a batch into tensors", xlabel="rows", ylabel="rows per second") as axes:
        for peer in peers(figures):
            speeds = [median(figures, case=case, peer=peer, name="rows_per_s") for case in found]
            axes.plot(sizes, speeds, marker="o", label=peer, color=colour(peer))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.legend(frameon=False)
    return [file]
