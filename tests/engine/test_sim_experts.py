"""Invented routing: a function of the ids so far, whoever computes it and in however many calls."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from support.sim_engines import answer_now, request, started
from support.virtual_clock import run
from zagent.config import SimConfig
from zagent.engine.sim.experts import ExpertRouter

IDS = np.random.default_rng(1).integers(0, 32_000, 300).astype(np.int32)
PROMPT = IDS[:200]
MOE = {"moe_layers": 3, "experts": 12, "experts_per_token": 5, "seed": 7}


def routed(ids: np.ndarray, layers: int = 3, experts: int = 12, per_token: int = 5, seed: int = 7) -> np.ndarray:
    return ExpertRouter(layers, experts, per_token, seed).routed(ids)


def mixed(word: int) -> int:
    """The last step of splitmix64 in Python's integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word ^ (word >> 31)


def word(text: str, at: int = 0) -> int:
    return int.from_bytes(hashlib.shake_128(text.encode()).digest(8 * at + 8)[8 * at :], "little")


def one_by_one(ids: np.ndarray, layers: int, experts: int, per_token: int, seed: int) -> list[list[list[int]]]:
    """What `routed` should be, one token after the other."""
    units = [step for step in range(experts) if math.gcd(step, experts) == 1]
    key, total, found = word(f"{seed} experts by position"), 0, []
    for i, token_id in enumerate(ids.tolist()):
        position = mixed(((i + 1) * 0x9E3779B97F4A7C15 + key) % 2**64)
        total = (total + mixed((position + token_id) % 2**64)) % 2**64
        hashes = [mixed(total ^ word(f"{seed} experts by layer", layer)) for layer in range(layers)]
        found.append(
            [[(h % experts + units[(h >> 32) % len(units)] * k) % experts for k in range(per_token)] for h in hashes]
        )
    return found


@pytest.mark.parametrize(("experts", "per_token"), [(12, 5), (1, 1), (2, 2), (60, 4), (2**15, 3)])
def test_experts_are_those_of_plain_integers(experts: int, per_token: int) -> None:
    """The arrays hold what a loop over tokens and layers in Python's integers gives: the same on every machine."""
    found = routed(IDS[:40], 4, experts, per_token, -3)
    assert found.dtype == np.int16
    assert found.tolist() == one_by_one(IDS[:40], 4, experts, per_token, -3)


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (6, 6), (7, 3), (64, 8), (2**15, 2**9)])
def test_a_tokens_experts_are_distinct_and_exist(experts: int, per_token: int) -> None:
    """No expert twice per token and layer, none beyond the last."""
    found = np.sort(routed(IDS[:50], 2, experts, per_token), axis=-1)
    assert (np.diff(found, axis=-1) > 0).all()
    assert found.min() >= 0
    assert found.max() < experts


def test_experts_stay_when_the_sequence_goes_on() -> None:
    """Each row depends on the ids up to its own and on none after it."""
    whole = routed(IDS)
    assert all((routed(IDS[:n]) == whole[:n]).all() for n in (0, 1, 2, 63, 64, 299))


def test_every_id_and_its_place_count() -> None:
    """Another id, or two ids in another order, change the rows from there on and none before."""
    whole = routed(IDS)
    other, swapped = IDS.copy(), IDS.copy()
    other[100] += 1
    swapped[[100, 101]] = swapped[[101, 100]]
    for changed in (other, swapped):
        differs = (routed(changed) != whole).any(axis=(1, 2))
        assert not differs[:100].any()
        assert differs[100:].mean() > 0.99


def test_layers_and_seeds_route_differently() -> None:
    """No layer repeats another, no seed another seed."""
    whole = routed(IDS)
    assert (whole[:, 0] != whole[:, 1]).any(axis=1).mean() > 0.9
    assert (routed(IDS, seed=8) != whole).any(axis=2).mean() > 0.9


def test_experts_are_used_alike() -> None:
    """Each expert gets its share in each place, within five standard deviations."""
    found = routed(np.arange(20_000, dtype=np.int32), 1, 12, 4)
    for place in range(4):
        counts = np.bincount(found[:, 0, place], minlength=12)
        assert np.abs(counts - 20_000 / 12).max() < 5 * (20_000 / 12) ** 0.5


def test_an_answer_brings_all_rows_but_the_last_tokens() -> None:
    """Rows cover prompt and answer from position 0; the last token was never the model's input."""
    answer = answer_now(run(started(**MOE)), request(PROMPT, 16))
    ids = np.concatenate([PROMPT, answer.token_ids])
    assert answer.routed_experts.shape == (200 + 16 - 1, 3, 5)
    assert (answer.routed_experts == routed(ids)[:-1]).all()


def test_the_last_call_covers_all_turns() -> None:
    """Turns, engines, request seeds and cached prefixes leave no trace: the last call's rows are those of its ids."""
    first = answer_now(run(started(0, **MOE)), request(PROMPT, 100, sampling_seed=5))
    engine = run(started(1, **MOE))
    for _ in range(2):  # the second time, the prompt is cached
        context = np.concatenate([PROMPT, first.token_ids, IDS[-7:]])
        second = answer_now(engine, request(context, 9, sampling_seed=6))
        assert (second.routed_experts == routed(np.concatenate([context, second.token_ids]))[:-1]).all()
        assert (second.routed_experts[: len(first.routed_experts)] == first.routed_experts).all()
    assert second.cached_tokens > 0


def test_an_aborted_call_has_rows_for_what_it_returns() -> None:
    """Half the tokens, and the rows of no others; an abort without tokens has none at all (pitfall D17)."""
    engine = run(started(**MOE, faults=({"every": 1, "do": "abort"},)))
    aborted = answer_now(engine, request(PROMPT, 16))
    assert (aborted.stop_reason, len(aborted.token_ids)) == ("abort", 8)
    assert (aborted.routed_experts == routed(np.concatenate([PROMPT, aborted.token_ids]))[:-1]).all()
    assert answer_now(engine, request(PROMPT, 1)).routed_experts is None


def test_nothing_sampled_or_dense_has_no_rows() -> None:
    """None for an empty answer, and for every answer of a model without such layers (the default)."""
    assert answer_now(run(started(**MOE)), request(PROMPT, 0)).routed_experts is None
    assert answer_now(run(started()), request(PROMPT)).routed_experts is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token=5 of only experts=4"),
        ({"experts": 2**15 + 1}, "experts"),
        ({"moe_layers": -1}, "moe_layers"),
        ({"experts_per_token": 0}, "experts_per_token"),
    ],
)
def test_impossible_routing_is_refused(keys: dict[str, int], said: str) -> None:
    """More experts per token than there are, ids beyond int16, negative layers."""
    with pytest.raises(ValueError, match=said):
        SimConfig(**keys)
