"""How long modelled engines take, and for what."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.modelled.clock import Clock
from benchmarks.modelled.engine import Job, ModelEngine, Speed

#: A prompt of 640 tokens takes 0.64 s, a token 10 ms, 11 ms beside another call.
SPEED = Speed(prefill_tokens_per_s=1000, step_s=0.010, call_s=0.001, max_batch=2, kv_tokens=64_000)


def ends(jobs: list[tuple[list[int], int, int]], speed: Speed = SPEED) -> tuple[list[float], ModelEngine]:
    """When jobs (keys, prompt, answer) that come at once end."""
    clock = Clock()
    engine = ModelEngine(clock, speed)
    ended = [0.0] * len(jobs)

    def note(number: int) -> None:
        ended[number] = clock.now

    for number, (keys, prompt, answer) in enumerate(jobs):
        engine.submit(Job(keys, prompt, answer, partial(note, number)))
    clock.run()
    return ended, engine


def keys(owner: int, prompt: int, answer: int) -> list[int]:
    return [owner * 1000 + block for block in range((prompt + answer) // 64)]


def test_one_call_takes_its_prompt_and_its_steps() -> None:
    """0.64 s and 100 steps of 10 ms."""
    (end,), engine = ends([(keys(1, 640, 100), 640, 100)])
    assert end == pytest.approx(0.64 + 1.0)
    assert engine.busy_s == pytest.approx(end)


def test_prompts_are_computed_before_decoding_goes_on() -> None:
    """The second prompt holds the first call up; then both decode, more slowly."""
    ended, _ = ends([(keys(i, 640, 100), 640, 100) for i in range(2)])
    assert ended == pytest.approx([1.28 + 1.1] * 2)


def test_a_third_call_waits_for_a_place_in_the_batch() -> None:
    """It begins when the first one ends."""
    ended, _ = ends([(keys(1, 640, 50), 640, 50), (keys(2, 640, 100), 640, 100), (keys(3, 640, 10), 640, 10)])
    first = 1.28 + 50 * 0.011
    assert ended == pytest.approx([first, first + 0.64 + 10 * 0.011 + 40 * 0.010, first + 0.64 + 10 * 0.011])


def test_a_sample_finds_the_prompt_of_the_one_before() -> None:
    """All whole blocks but the last, which must be computed to have something to sample from."""
    shared = keys(1, 640, 0)
    _, engine = ends([([*shared, 7001], 640, 100), ([*shared, 8001], 640, 100)])
    assert (engine.prefilled, engine.cached) == (640 + 64, 576)


def test_a_later_turn_finds_the_answer_too() -> None:
    """Prompt and answer are kept as one prefix."""
    clock = Clock()
    engine = ModelEngine(clock, SPEED)
    context = keys(1, 640, 128)
    engine.submit(Job(context, 640, 128, lambda: engine.submit(Job([*context, 9], 768 + 10, 54, lambda: None))))
    clock.run()
    assert (engine.prefilled, engine.cached) == (640 + 10, 768)


def test_the_last_call_is_put_back_where_memory_is_short() -> None:
    """It ends all the same, later, and computes again what was thrown out."""
    jobs = [(keys(i, 640, 1280), 640, 1280) for i in range(2)]
    roomy, _ = ends(jobs)
    ended, engine = ends(jobs, SPEED._replace(kv_tokens=40 * 64))
    assert engine.preempted > 0
    assert engine.prefilled > 2 * 640
    assert ended[1] > ended[0]
    assert ended[1] > roomy[1]


def test_a_call_that_can_never_fit_is_refused() -> None:
    """It would wait for ever."""
    with pytest.raises(ValueError, match="12 blocks, 10 at most"):
        ends([(keys(1, 640, 128), 640, 128)], SPEED._replace(kv_tokens=640))
