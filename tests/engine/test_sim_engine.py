"""Unit tests on virtual time: the simulated engine's answers, durations, batch, cache and bad input."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from support.sim_engines import answer_now, request, started
from support.virtual_clock import run
from zagent.config import SimConfig
from zagent.engine.sim import build
from zagent.errors import ConfigError, EngineError, InvalidRequest, PromptTooLong

PROMPT = np.arange(10, 210, dtype=np.int32)


async def seconds(engine, *calls) -> list[float]:
    """Virtual seconds until each of the calls, all sent now, is answered."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(call) -> float:
        await engine.generate(call)
        return loop.time() - start

    return await asyncio.gather(*map(one, calls))


def test_an_answer_fills_the_budget():
    """Ids are int32, log-probabilities float32 of the same length; reason, version span and preemptions are told."""
    out = answer_now(run(started()), request(PROMPT, 128, logprobs=True))
    assert (out.token_ids.dtype, out.token_ids.shape) == (np.int32, (128,))
    assert (out.log_probs.dtype, out.log_probs.shape) == (np.float32, (128,))
    assert (out.stop_reason, out.versions, out.num_preempted) == ("length", [(0, 0, 128)], 0)


def test_log_probabilities_only_on_request():
    """Without `logprobs` there are none, and the tokens are the same."""
    engine = run(started())
    silent = answer_now(engine, request(PROMPT))
    assert silent.log_probs is None
    assert (answer_now(engine, request(PROMPT, logprobs=True)).token_ids == silent.token_ids).all()


def test_every_engine_gives_the_same_answer():
    """Index, speeds and cache do not matter."""
    fast = answer_now(run(started(0)), request(PROMPT, logprobs=True))

    async def slow():
        engine = await started(3, prefill_tokens_per_s=10, decode_tokens_per_s=1, kv_capacity_tokens=0)
        return await engine.generate(request(PROMPT, logprobs=True))

    other = run(slow())
    assert (fast.token_ids == other.token_ids).all()
    assert (fast.log_probs == other.log_probs).all()


def test_request_seeds_separate_samples():
    """Different `sampling_seed`s give different answers, the same one the same; absent counts as 0."""
    engine = run(started())

    def answer(**params):
        return answer_now(engine, request(PROMPT, **params)).token_ids.tolist()

    assert answer(sampling_seed=1) == answer(sampling_seed=1) != answer(sampling_seed=2)
    assert answer(sampling_seed=0) == answer() == answer(sampling_seed=None)


def test_greedy_ignores_the_request_seed():
    """At temperature 0 all seeds give one answer."""
    engine = run(started())
    answers = {tuple(answer_now(engine, request(PROMPT, temperature=0, sampling_seed=s)).token_ids) for s in range(5)}
    assert len(answers) == 1


def test_the_budget_ends_at_the_context():
    """Without `max_new_tokens`, or with too many, the answer fills the context; 0 gives an empty one."""
    engine = run(started(context_length=300))
    for tokens in (None, 10_000):
        assert answer_now(engine, request(PROMPT, tokens)).token_ids.size == 99
    empty = answer_now(engine, request(PROMPT, 0, logprobs=True))
    assert (empty.token_ids.size, empty.log_probs.size, empty.stop_reason) == (0, 0, "length")


def test_answers_end_by_chance_with_the_end_token():
    """With `eos_probability` p the end token comes last and only there, after 1/p tokens on average."""
    engine = run(started(eos_probability=0.01))
    outs = [answer_now(engine, request(PROMPT, 20_000, sampling_seed=s, logprobs=True)) for s in range(2000)]
    assert {out.stop_reason for out in outs} == {"stop"}
    assert all(np.flatnonzero(out.token_ids == 2).tolist() == [out.token_ids.size - 1] for out in outs)
    assert all(out.log_probs.size == out.token_ids.size for out in outs)
    assert np.mean([out.token_ids.size for out in outs]) == pytest.approx(100, abs=6 * 100 / 2000**0.5)


def test_rare_ends_stay_rare_in_a_small_vocabulary():
    """A chance far below 1/vocabulary is kept: 1 000 tokens on average at 0.001, with 32 ids."""
    engine = run(started(eos_probability=0.001, vocab_size=32))
    ids = np.arange(3, 30)
    sizes = [answer_now(engine, request(ids, 50_000, sampling_seed=s)).token_ids.size for s in range(1000)]
    assert np.mean(sizes) == pytest.approx(1000, abs=6 * 1000 / 1000**0.5)


def test_a_continuation_ends_where_the_undisturbed_answer_does():
    """Cutting an answer that ends by chance and continuing gives the same tokens, end included."""
    engine = run(started(eos_probability=0.002))
    whole = answer_now(engine, request(PROMPT, 20_000)).token_ids
    for cut in (0, 1, whole.size // 2, whole.size - 1):
        rest = answer_now(engine, request(np.concatenate([PROMPT, whole[:cut]]), 20_000 - cut))
        assert rest.token_ids.tolist() == whole[cut:].tolist()


def test_ignore_eos_runs_to_the_limit():
    """`ignore_eos` gives the full budget without end tokens."""
    out = answer_now(run(started(eos_probability=0.5)), request(PROMPT, 500, ignore_eos=True))
    assert (out.token_ids.size, 2 in out.token_ids, out.stop_reason) == (500, False, "length")


@pytest.mark.parametrize("least", [1, 5, 1024, 1025, 1500])
def test_min_new_tokens_defers_the_end(least):
    """With certain ends the answer has exactly `min_new_tokens` tokens."""
    out = answer_now(run(started(eos_probability=1.0)), request(PROMPT, 2000, min_new_tokens=least))
    assert (out.token_ids.size, out.token_ids[-1], out.stop_reason) == (least, 2, "stop")


@pytest.mark.parametrize("at", [0, 7, 1023, 1024, 1999])
def test_stop_token_ids_end_the_answer(at):
    """The answer ends with the first stop token in it, at any distance."""
    engine = run(started())
    whole = answer_now(engine, request(PROMPT, 2000)).token_ids.tolist()
    stop = whole[at]
    out = answer_now(engine, request(PROMPT, 2000, stop_token_ids=[31_999, stop]))
    assert out.token_ids.tolist() == whole[: whole.index(stop) + 1]
    assert out.stop_reason == "stop"


def test_prefill_and_decode_take_their_time():
    """200 prompt tokens at 100/s and 30 new ones at 10/s take 5 virtual seconds."""

    async def main():
        engine = await started(prefill_tokens_per_s=100, decode_tokens_per_s=10)
        return await seconds(engine, request(PROMPT, 30))

    assert run(main()) == pytest.approx([5.0])


def test_sequences_decode_side_by_side_up_to_max_batch():
    """Two at once, the others in order of arrival: 5 calls of 1 s finish after 1, 1, 2, 2 and 3 s."""

    async def main():
        engine = await started(decode_tokens_per_s=10, max_batch=2)
        return await seconds(engine, *[request(PROMPT + i, 10) for i in range(5)])

    assert run(main()) == pytest.approx([1, 1, 2, 2, 3])


def test_in_flight_counts_running_and_waiting():
    """Calls count from acceptance to answer, error or cancel, also those that wait for a place in the batch."""

    async def main():
        engine = await started(decode_tokens_per_s=10, max_batch=1)
        tasks = [asyncio.create_task(engine.generate(request(PROMPT, 10))) for _ in range(3)]
        await asyncio.sleep(0.5)
        seen = [engine.in_flight()]
        tasks[2].cancel()
        await asyncio.sleep(0)
        seen.append(engine.in_flight())
        await asyncio.sleep(1)
        seen.append(engine.in_flight())
        await tasks[1]
        with pytest.raises(InvalidRequest):
            await engine.generate(request([]))
        return [*seen, engine.in_flight()]

    assert run(main()) == [3, 2, 1, 0]


def test_cancel_frees_the_place_at_once():
    """When the running call is cancelled, the waiting one starts at that moment."""

    async def main():
        engine = await started(decode_tokens_per_s=10, max_batch=1)
        first = asyncio.create_task(engine.generate(request(PROMPT, 1000)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(2, first.cancel)
        waited = await seconds(engine, request(PROMPT, 10))
        assert first.cancelled()
        return waited

    assert run(main()) == pytest.approx([3.0])


def test_a_second_turn_prefills_only_what_is_new():
    """Prompt and answer of the first turn are cached in whole blocks, and cost no prefill time."""

    async def main():
        engine = await started(prefill_tokens_per_s=1)
        answer = await engine.generate(request(PROMPT, 100))
        turn = np.concatenate([PROMPT, answer.token_ids, PROMPT])
        start = asyncio.get_running_loop().time()
        second = await engine.generate(request(turn))
        return answer.cached_tokens, second.cached_tokens, asyncio.get_running_loop().time() - start

    assert run(main()) == (0, 256, pytest.approx(500 - 256))


def test_a_prompt_is_cached_once_its_prefill_is_done():
    """A call that comes while another decodes the same prompt finds it; one that comes during its prefill does not."""

    async def main():
        engine = await started(prefill_tokens_per_s=100, decode_tokens_per_s=1)
        tasks = [asyncio.create_task(engine.generate(request(PROMPT)))]
        for delay in (1, 2):
            await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(engine.generate(request(PROMPT))))
        return [out.cached_tokens for out in await asyncio.gather(*tasks)]

    assert run(main()) == [0, 0, 192]


def test_the_last_prompt_token_is_always_computed():
    """A prompt of exactly three blocks is cached up to the second, as its last token's output is needed."""
    engine = run(started())
    answer_now(engine, request(PROMPT[:192]))
    assert answer_now(engine, request(PROMPT[:192])).cached_tokens == 128


def test_the_last_token_of_an_answer_is_not_cached():
    """It never went through the model: 192 + 64 tokens leave three whole blocks, one token more leaves four."""
    engine = run(started())
    turn = np.concatenate([PROMPT[:192], answer_now(engine, request(PROMPT[:192], 65)).token_ids])
    engine = run(started())
    seen = []
    for tokens in (64, 65):
        answer_now(engine, request(PROMPT[:192], tokens))
        seen.append(answer_now(engine, request(turn, 0)).cached_tokens)
    assert seen == [192, 256]


def test_the_cache_evicts_by_last_use():
    """With room for two prompts, the one not used for longest is forgotten."""
    engine = run(started(kv_capacity_tokens=6 * 64))
    for start in (0, 1000, 0, 2000):
        answer_now(engine, request(PROMPT + start, 0))
    assert answer_now(engine, request(PROMPT, 0)).cached_tokens == 192
    assert answer_now(engine, request(PROMPT + 1000, 0)).cached_tokens == 0


def test_capacity_zero_is_no_cache():
    """With `kv_capacity_tokens=0` nothing is ever cached."""
    engine = run(started(kv_capacity_tokens=0))
    assert [answer_now(engine, request(PROMPT)).cached_tokens for _ in range(2)] == [0, 0]


def test_clear_cache_forgets_all_prefixes():
    """After `clear_cache` the same prompt is prefilled again, and cached again."""

    async def main():
        engine = await started()
        seen = []
        for _ in range(2):
            seen += [(await engine.generate(request(PROMPT))).cached_tokens for _ in range(2)]
            await engine.clear_cache()
        return seen

    assert run(main()) == [0, 192, 0, 192]


def test_clear_cache_is_refused_while_calls_run():
    """As SGLang's flush does, it fails with calls in flight, and says how many."""

    async def main():
        engine = await started(decode_tokens_per_s=1)
        task = asyncio.create_task(engine.generate(request(PROMPT)))
        await asyncio.sleep(1)
        with pytest.raises(EngineError, match="1 calls in flight"):
            await engine.clear_cache()
        await task
        await engine.clear_cache()

    run(main())


def test_the_caller_keeps_its_arrays_and_dict():
    """Neither prompt nor sampling parameters are changed, and the answer shares no memory with the prompt."""
    call = request(PROMPT.copy(), temperature=0.7, logprobs=True)
    before = dict(call.sampling_params)
    out = answer_now(run(started()), call)
    assert (call.sampling_params, call.prompt_ids.tolist()) == (before, PROMPT.tolist())
    assert not np.shares_memory(out.token_ids, call.prompt_ids)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"sampling_seed": 1.5}, "sampling_seed"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"n": 2}, "n must be 1"),
    ],
)
def test_bad_sampling_parameters_are_named(params, named):
    """An unknown key or an impossible value is `InvalidRequest` for that call, naming the key."""
    engine = run(started())
    with pytest.raises(InvalidRequest, match=named):
        answer_now(engine, request(PROMPT, None, **params))
    assert engine.in_flight() == 0


@pytest.mark.parametrize(("ids", "error"), [([], InvalidRequest), ([32_000], InvalidRequest), ([-1], InvalidRequest)])
def test_bad_prompts_are_refused(ids, error):
    """Empty prompts and ids outside the vocabulary are refused."""
    with pytest.raises(error):
        answer_now(run(started()), request(ids))


def test_a_prompt_beyond_the_context_is_too_long():
    """No room for one token is `PromptTooLong`."""
    with pytest.raises(PromptTooLong):
        answer_now(run(started(context_length=200)), request(PROMPT))


def test_an_end_token_outside_the_vocabulary_is_refused_at_build():
    """The message names the key."""
    with pytest.raises(ConfigError, match=r"engine\.sim\.eos_token_id"):
        build(sim=SimConfig(vocab_size=100, eos_token_id=100), name="e", index=0)


def test_a_closed_engine_takes_no_calls():
    """Before `start` and after `close`, `generate` is an `EngineError` naming the engine."""

    async def main():
        engine = build(sim=SimConfig(), name="engine-7", index=7)
        with pytest.raises(EngineError, match="engine-7"):
            await engine.generate(request(PROMPT))
        await engine.start()
        await engine.generate(request(PROMPT))
        await engine.close()
        with pytest.raises(EngineError, match="engine-7"):
            await engine.generate(request(PROMPT))

    run(main())


def test_a_forgotten_wake_up_is_an_error():
    """The virtual clock reports a wait that nothing will end, instead of hanging."""

    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="forgotten wake-up"):
        run(main())
