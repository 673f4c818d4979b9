"""Unit tests on virtual time: a simulated engine is halted, and gets other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.sim_engines import answer_now, request, started
from support.virtual_clock import run
from support.weights import weights_directory
from zagent.engine.base import PauseMode
from zagent.engine.sim import SimEngine
from zagent.engine.sim.halt import Halt
from zagent.errors import EngineError
from zagent.types import TokenOutput

PROMPT = np.arange(10, 210, dtype=np.int32)
#: 200 tokens of prompt take 2 s, 100 new ones 10 s.
SPEEDS: dict[str, Any] = {"prefill_tokens_per_s": 100, "decode_tokens_per_s": 10}
CALL = {"logprobs": True, "sampling_seed": 3}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return weights_directory(tmp_path / "w")


def now() -> float:
    return asyncio.get_running_loop().time()


async def call(engine: SimEngine, tokens: int = 100, prompt: np.ndarray = PROMPT, **params: Any) -> TokenOutput:
    return await engine.generate(request(prompt, tokens, **{**CALL, **params}))


def by_version(directory: str, prompt: np.ndarray, tokens: int, version: int, **sim: Any) -> TokenOutput:
    """What a fresh engine with those weights answers at once."""

    async def main() -> TokenOutput:
        engine = await started(**sim)
        if version:
            await engine.update_weights(directory, version, flush=True)
        return answer_now(engine, request(prompt, tokens, **CALL))

    return run(main())


async def halted(
    engine: SimEngine, mode: PauseMode, at_s: float, for_s: float = 3.0, update: tuple[str, int] | None = None
) -> float:
    """Pause then, change the weights, go on after ``for_s`` seconds; how long the pause itself took."""
    await asyncio.sleep(at_s - now())
    began = now()
    await engine.pause(mode)
    took = now() - began
    if update is not None:
        await engine.update_weights(*update, flush=mode == "abort")
    await asyncio.sleep(for_s - took)
    await engine.resume()
    return took


# ---- broken off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_s", "tokens"), [(0.0, 0), (1.0, 0), (2.0, 0), (2.05, 0), (4.55, 25), (11.95, 99)])
def test_an_abort_ends_what_runs_with_the_tokens_it_has(at_s: float, tokens: int) -> None:
    """In prefill there are none; in decode as many as the time allowed, the first of the undisturbed answer. The pause
    takes no time."""

    async def main() -> tuple[TokenOutput, float, float]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        took = await halted(engine, "abort", at_s)
        return await running, took, engine.in_flight()

    answer, took, left = run(main())
    whole = answer_now(run(started()), request(PROMPT, 100, **CALL))
    assert (answer.stop_reason, took, left) == ("abort", 0.0, 0)
    assert answer.token_ids.tolist() == whole.token_ids[:tokens].tolist()
    assert answer.log_probs.tolist() == whole.log_probs[:tokens].tolist()
    assert [span for span in answer.versions if span[1] < span[2]] == ([(0, 0, tokens)] if tokens else [])


def test_an_abort_ends_what_waits_for_a_place_too() -> None:
    """The second of two calls on an engine that takes one has no token, and the pause waits for both to be out."""

    async def main() -> tuple[list[int], list[str], float]:
        engine = await started(max_batch=1, **SPEEDS)
        running = [asyncio.create_task(call(engine, prompt=PROMPT + i)) for i in range(2)]
        await halted(engine, "abort", 4.55)
        answers = await asyncio.gather(*running)
        assert len((await call(engine)).token_ids) == 100  # the place is free
        return [len(answer.token_ids) for answer in answers], [answer.stop_reason for answer in answers], now()

    sizes, reasons, ended = run(main())
    assert (sizes, reasons) == ([25, 0], ["abort", "abort"])
    assert ended == pytest.approx(7.55 + 12 - 1.92)  # after the pause; 192 tokens of the prompt are in the cache


def test_who_comes_while_calls_stand_still_waits() -> None:
    """Then it takes the time it always takes; it counts as in flight meanwhile, and may be cancelled."""

    async def main() -> tuple[float, int]:
        engine = await started(**SPEEDS)
        await engine.pause("in_place")
        late, unwanted = asyncio.create_task(call(engine)), asyncio.create_task(call(engine))
        await asyncio.sleep(1)
        seen = engine.in_flight()
        unwanted.cancel()
        await asyncio.sleep(4)
        assert unwanted.cancelled()
        await engine.resume()
        await late
        assert engine.in_flight() == 0
        return now(), seen

    assert run(main()) == (pytest.approx(5 + 12), 2)


def test_who_comes_while_calls_are_broken_off_is_so_too() -> None:
    """At once, without a token, also where it had been waiting for the end of a freeze."""

    async def main() -> None:
        engine = await started(**SPEEDS)
        await engine.pause("in_place")
        early = asyncio.create_task(call(engine))
        await asyncio.sleep(1)
        await engine.pause("abort")
        for answer in (await early, await call(engine)):
            assert (len(answer.token_ids), len(answer.log_probs), answer.stop_reason) == (0, 0, "abort")
        assert (now(), engine.in_flight()) == (1, 0)
        await engine.resume()
        assert len((await call(engine)).token_ids) == 100

    run(main())


def test_a_pause_and_its_end_may_come_again_and_again() -> None:
    """Without calls, twice the same, an end without a beginning: nothing happens."""

    async def main() -> int:
        engine = await started()
        await engine.resume()
        for mode in ("abort", "abort", "in_place", "in_place", "abort"):
            await engine.pause(mode)  # type: ignore[arg-type]
        await engine.resume()
        await engine.resume()
        return len((await call(engine)).token_ids)

    assert run(main()) == 100


# ---- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [0.0, 1.005, 2.0, 2.05, 4.55, 11.95])
def test_a_frozen_call_goes_on_where_it_stood(at_s: float) -> None:
    """In prefill and decode, in the middle of a token too: the undisturbed answer, later by the pause and no more."""

    async def main() -> tuple[TokenOutput, float]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        assert await halted(engine, "in_place", at_s) == 0.0
        return await running, now()

    answer, seconds = run(main())
    whole = answer_now(run(started()), request(PROMPT, 100, **CALL))
    assert seconds == pytest.approx(12 + 3)
    assert (answer.token_ids.tolist(), answer.log_probs.tolist()) == (
        whole.token_ids.tolist(),
        whole.log_probs.tolist(),
    )
    assert (answer.stop_reason, answer.versions) == ("length", [(0, 0, 100)])


def test_many_halts_cost_their_own_time_alone() -> None:
    """Two calls of different length, frozen five times, each in the middle of a token."""

    async def main() -> list[float]:
        engine = await started(**SPEEDS)
        ends = []

        async def timed(tokens: int) -> None:
            await call(engine, tokens, PROMPT + tokens)
            ends.append(now())

        running = [asyncio.create_task(timed(tokens)) for tokens in (50, 100)]
        for at_s in (1.115, 3.03, 5.07, 5.91, 7.56):
            await halted(engine, "in_place", at_s, 0.5)
        await asyncio.gather(*running)
        return ends

    assert run(main()) == pytest.approx([7 + 2.5, 12 + 2.5])


def test_a_place_is_waited_for_during_a_freeze() -> None:
    """The second of two calls on an engine that takes one has its turn when the first, frozen for a while, is done."""

    async def main() -> list[float]:
        engine = await started(max_batch=1, **SPEEDS)
        ends = []

        async def timed(number: int) -> None:
            await call(engine, prompt=PROMPT + 1000 * number)
            ends.append(now())

        running = [asyncio.create_task(timed(number)) for number in range(2)]
        await halted(engine, "in_place", 4.55)
        await asyncio.gather(*running)
        return ends

    assert run(main()) == pytest.approx([15, 27])


def test_a_frozen_call_may_be_cancelled() -> None:
    """At once; nothing is left of it, and an abort has nobody to wait for."""

    async def main() -> float:
        engine = await started(max_batch=1, **SPEEDS)
        frozen = asyncio.create_task(call(engine))
        await asyncio.sleep(4)
        await engine.pause("in_place")
        await asyncio.sleep(1)
        frozen.cancel()
        await asyncio.sleep(0)
        assert (frozen.cancelled(), engine.in_flight()) == (True, 0)
        await engine.pause("abort")
        await engine.resume()
        began = now()
        await call(engine, prompt=PROMPT + 1000)
        return now() - began

    assert run(main()) == pytest.approx(12)


def test_what_is_frozen_may_be_broken_off() -> None:
    """An abort ends it with the tokens it has, during the freeze."""

    async def main() -> tuple[int, str, float]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        await asyncio.sleep(4.55)
        await engine.pause("in_place")
        await asyncio.sleep(1)
        await engine.pause("abort")
        answer = await running
        assert engine.in_flight() == 0
        return len(answer.token_ids), answer.stop_reason, now()

    assert run(main()) == (25, "abort", pytest.approx(5.55))


# ---- other weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_s", "old"), [(1.0, 0), (2.0, 0), (4.55, 25), (11.95, 99)])
def test_tokens_after_a_change_in_place_are_those_of_the_new_weights(directory: str, at_s: float, old: int) -> None:
    """Up to there the old ones', from there on those that a fresh engine with the new weights gives for all ids before
    them; versions and log-probabilities belong to them."""

    async def main() -> tuple[TokenOutput, float]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        await halted(engine, "in_place", at_s, update=(directory, 7))
        return await running, now()

    answer, seconds = run(main())
    before = by_version(directory, PROMPT, 100, 0)
    ids = before.token_ids[:old].tolist()
    after = by_version(directory, np.concatenate([PROMPT, before.token_ids[:old]]), 100 - old, 7)
    assert answer.token_ids.tolist() == ids + after.token_ids.tolist() != before.token_ids.tolist()
    assert answer.log_probs.tolist() == before.log_probs[:old].tolist() + after.log_probs.tolist()
    assert answer.versions == ([(0, 0, old)] if old else []) + [(7, old, 100)]
    assert (answer.stop_reason, seconds) == ("length", pytest.approx(15))


def test_several_changes_leave_one_span_each(directory: str) -> None:
    """A halt without new weights leaves none."""

    async def main() -> TokenOutput:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        await halted(engine, "in_place", 3.05, update=(directory, 1))
        await halted(engine, "in_place", 7.05)
        await halted(engine, "in_place", 11.05, update=(directory, 2))
        return await running

    assert run(main()).versions == [(0, 0, 10), (1, 10, 30), (2, 30, 100)]


def test_an_answer_may_end_under_either_weights(directory: str) -> None:
    """Ends by chance, least lengths and stop tokens are counted over the whole answer."""

    async def main(**params: Any) -> TokenOutput:
        engine = await started(eos_probability=1.0, **SPEEDS)
        running = asyncio.create_task(call(engine, **params))
        await halted(engine, "in_place", 4.05, update=(directory, 1))
        return await running

    answer = run(main(min_new_tokens=30))
    assert (answer.token_ids.size, answer.token_ids[-1], answer.stop_reason) == (30, 2, "stop")
    assert answer.versions == [(0, 0, 20), (1, 20, 30)]
    early = run(main(min_new_tokens=5))
    assert (early.token_ids.size, early.versions) == (5, [(0, 0, 5)])


def test_each_version_has_tokens_of_its_own_and_the_first_those_of_ever(directory: str) -> None:
    """Greedy ones, too. Version 0 are the weights that the engine started with."""
    engine = run(started())
    answers = {}
    for version in range(4):
        if version:
            run(engine.update_weights(directory, version, flush=True))
        for temperature in (0.0, 1.0):
            ids = answer_now(engine, request(PROMPT, 20, temperature=temperature, sampling_seed=3)).token_ids
            answers[tuple(ids)] = version, temperature
        assert engine.version == version
    assert len(answers) == 8


@pytest.mark.parametrize("flush", [True, False])
def test_kv_of_other_weights_is_never_found(directory: str, flush: bool) -> None:
    """Neither by a new call nor when the old weights' KV was left where it is; and each version has its own again."""
    engine = run(started())
    seen = []
    for version in (0, 1, 2):
        if version:
            run(engine.update_weights(directory, version, flush=flush))
        seen += [answer_now(engine, request(PROMPT)).cached_tokens for _ in range(2)]
    assert seen == [0, 192] * 3


@pytest.mark.parametrize("at_s", [1.0, 4.55])
def test_kv_of_a_call_that_changed_weights_belongs_to_the_old_ones(directory: str, at_s: float) -> None:
    """Its prefix was computed by them: no call on the new weights finds anything of it, in prefill or decode."""

    async def main() -> list[int]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        await halted(engine, "in_place", at_s, update=(directory, 1))
        answer = await running
        turn = np.concatenate([PROMPT, answer.token_ids])
        return [(await call(engine, 1, turn)).cached_tokens for _ in range(2)]

    assert run(main()) == [0, 256]


def test_routed_experts_are_there_for_the_whole_answer(directory: str) -> None:
    """One row for each token but the last, across a change."""

    async def main() -> TokenOutput:
        engine = await started(moe_layers=2, **SPEEDS)
        running = asyncio.create_task(call(engine))
        await halted(engine, "in_place", 4.55, update=(directory, 1))
        return await running

    assert run(main()).routed_experts.shape == (299, 2, 8)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_what_is_told_on_the_way_has_no_gap_at_a_halt(directory: str, mode: PauseMode) -> None:
    """Frozen after 25 tokens, told of by tens: what comes after the change begins where the last piece ended, each
    piece with its own version, and the last tokens come with the answer alone. Broken off, the last ones are not told
    of."""

    async def main() -> tuple[TokenOutput, list[TokenOutput]]:
        engine = await started(checkpoint_tokens=10, **SPEEDS)
        pieces: list[TokenOutput] = []
        running = asyncio.create_task(engine.generate(request(PROMPT, 100, **CALL), pieces.append))
        await halted(engine, mode, 4.55, update=(directory, 1))
        return await running, pieces

    answer, pieces = run(main())
    told = np.concatenate([piece.token_ids for piece in pieces])
    assert told.tolist() == answer.token_ids[: told.size].tolist()
    assert [(piece.versions[0][0], len(piece.token_ids)) for piece in pieces] == (
        [(0, 10), (0, 10), (0, 5), *[(1, 10)] * 7] if mode == "in_place" else [(0, 10), (0, 10)]
    )
    assert told.size < answer.token_ids.size


def test_new_weights_come_also_while_calls_run(directory: str) -> None:
    """An engine that catches up by itself has some: they end on the weights they began with, and new ones have the
    others."""

    async def main() -> tuple[TokenOutput, TokenOutput]:
        engine = await started(**SPEEDS)
        running = asyncio.create_task(call(engine))
        await asyncio.sleep(4)
        await engine.update_weights(directory, 1, flush=True)
        return await running, await call(engine)

    old, new = run(main())
    assert (old.versions, new.versions, new.cached_tokens) == ([(0, 0, 100)], [(1, 0, 100)], 0)
    assert old.token_ids.tolist() == by_version(directory, PROMPT, 100, 0).token_ids.tolist()


def test_weights_that_are_not_there_change_nothing(directory: str, tmp_path: Path) -> None:
    """`EngineError`; version, checksum and tokens stay."""

    async def main() -> None:
        engine = await started()
        await engine.update_weights(directory, 1, flush=True)
        before = await engine.checksum(), answer_now(engine, request(PROMPT)).token_ids.tolist()
        (tmp_path / "empty").mkdir()
        for place in (tmp_path / "empty", tmp_path / "nowhere"):
            with pytest.raises(EngineError, match="no safetensors"):
                await engine.update_weights(str(place), 2, flush=True)
        assert engine.version == 1
        assert (await engine.checksum(), answer_now(engine, request(PROMPT)).token_ids.tolist()) == before

    run(main())


def test_checksums_are_equal_for_equal_weights_only(tmp_path: Path) -> None:
    """By version, names and sizes of the files; whichever engine."""

    async def main() -> list[str]:
        places = [weights_directory(tmp_path / name, size) for name, size in (("a", 4), ("b", 4), ("c", 8))]
        sums = []
        for place in places:
            engine = await started()
            await engine.update_weights(place, 1, flush=True)
            sums.append(await engine.checksum())
        await engine.update_weights(places[2], 2, flush=True)
        return [*sums, await engine.checksum(), await (await started()).checksum()]

    same, other, *different = run(main())
    assert same == other
    assert len({same, *different}) == 4


# ---- the halt by itself ---------------------------------------------------------------------------------------------


def test_a_nap_says_whether_it_was_slept_through() -> None:
    """Woken at once by either halt; during one, nobody falls asleep; a nap that is cancelled leaves nothing."""

    async def main() -> None:
        halt = Halt()
        assert await halt.sleep(2)
        for mode in ("in_place", "abort"):
            nap = asyncio.create_task(halt.sleep(5))
            await asyncio.sleep(1)
            await halt.begin(mode)  # type: ignore[arg-type]
            began = now()
            assert not await nap
            assert not await halt.sleep(5)
            assert now() == began
            halt.end()
        cancelled = asyncio.create_task(halt.sleep(5))
        await asyncio.sleep(1)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert not halt._sleeping

    run(main())


def test_an_abort_waits_until_all_are_out() -> None:
    """However long they take; nobody enters meanwhile."""

    async def main() -> float:
        halt = Halt()
        for _ in range(2):
            await halt.enter()
        for at_s in (3.0, 5.0):
            asyncio.get_running_loop().call_at(at_s, halt.leave)
        late = asyncio.create_task(halt.enter())
        await asyncio.sleep(0)
        halt.leave()  # the third is in, and out again, before
        await late
        beginning = asyncio.create_task(halt.begin("abort"))
        await asyncio.sleep(1)
        assert not await halt.enter()
        await beginning
        assert not await halt.enter()
        halt.end()
        assert await halt.enter()
        return now()

    assert run(main()) == 5.0
