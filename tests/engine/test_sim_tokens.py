"""Unit tests: the token source's promises, for any prompt, seed and vocabulary."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zagent.engine.sim.tokens import TokenSource, token_source

VOCABULARIES = [(32, 2), (32, 31), (50, 49), (97, 5), (32_000, 2), (32_000, 31_995), (151_936, 151_645), (2**20, 7)]
SHORT = settings(max_examples=60, deadline=None)


def draw(source: TokenSource, ids: np.ndarray, count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    state = source.state(ids, seed)
    return source.tokens(state, 0, count).tolist(), source.log_probs(state, 0, count).tolist()


@st.composite
def prompts(draw_value: st.DrawFn) -> tuple[int, int, np.ndarray]:
    """Any vocabulary with a prompt over it, rich in the ids that need special care: the end token and the last ids."""
    vocab, eos = draw_value(st.sampled_from(VOCABULARIES))
    odd = st.sampled_from([eos, vocab - 1, vocab - 2, 0, 1])
    ids = draw_value(st.lists(odd | st.integers(0, vocab - 1), min_size=1, max_size=80))
    return vocab, eos, np.array(ids, np.int32)


@SHORT
@given(prompts(), st.integers(0, 40), st.integers(0, 2**64), st.integers(-5, 5))
def test_a_continued_answer_equals_an_undisturbed_one(case, cut, request_seed, seed):
    """Prompt plus the first k tokens gives the rest of the answer, tokens and log-probabilities, for every k."""
    vocab, eos, ids = case
    source = token_source(vocab, eos, seed)
    tokens, log_probs = draw(source, ids, 40, request_seed)
    rest = draw(source, np.concatenate([ids, np.array(tokens[:cut], np.int32)]), 40 - cut, request_seed)
    assert rest == (tokens[cut:], log_probs[cut:])


@SHORT
@given(prompts(), st.integers(0, 30), st.data())
def test_continuing_after_foreign_tokens_is_exact_too(case, cut, data):
    """The property holds for a second answer behind tool tokens, as in a second turn that is cut and continued."""
    vocab, eos, ids = case
    source = token_source(vocab, eos, 0)
    first, _ = draw(source, ids, 10)
    tool = data.draw(st.lists(st.integers(0, vocab - 1), max_size=5))
    turn = np.array([*ids, *first, *tool], np.int32)
    whole, _ = draw(source, turn, 30)
    rest, _ = draw(source, np.concatenate([turn, np.array(whole[:cut], np.int32)]), 30 - cut)
    assert rest == whole[cut:]


@SHORT
@given(prompts(), st.data())
def test_changing_any_single_id_changes_the_answer(case, data):
    """One different id anywhere in the prompt gives another answer."""
    vocab, eos, ids = case
    other = ids.copy()
    place = data.draw(st.integers(0, ids.size - 1))
    other[place] = data.draw(st.integers(0, vocab - 1).filter(lambda value: value != ids[place]))
    source = token_source(vocab, eos, 0)
    assert draw(source, ids, 40)[0] != draw(source, other, 40)[0]


def test_ids_that_share_a_residue_are_told_apart():
    """Modulo the prime the ids 2, 31 993 and the stand-in 31 999 are one; in a prompt they are three."""
    source = token_source(32_000, 2, 0)
    assert source.prime + 2 == 31_993
    answers = [draw(source, np.array([7, x, 9], np.int32), 20)[0] for x in (2, 31_993, 31_999)]
    assert len(set(map(tuple, answers))) == 3


@SHORT
@given(prompts(), st.data())
def test_order_counts(case, data):
    """The same ids in another order give another answer."""
    vocab, eos, ids = case
    other = np.array(data.draw(st.permutations(ids.tolist())), np.int32)
    source = token_source(vocab, eos, 0)
    assert (draw(source, ids, 40)[0] == draw(source, other, 40)[0]) == bool((ids == other).all())


def test_a_swap_over_the_length_of_the_hash_period_counts():
    """Ids swapped prime - 1 positions apart, where powers of the hash bases repeat, give another answer."""
    source = token_source(97, 5, 0)
    ids = np.arange(300, dtype=np.int32) % 90
    other = ids.copy()
    other[[10, 10 + source.prime - 1]] = other[[10 + source.prime - 1, 10]]
    assert ids[10] != other[10]
    assert draw(source, ids, 30)[0] != draw(source, other, 30)[0]


def test_a_longer_prompt_does_not_shift_the_answer():
    """Dropping the first id gives an answer that shares no run of four tokens with the other."""
    source = token_source(32_000, 2, 0)
    ids = np.arange(3, 203, dtype=np.int32)
    one, _ = draw(source, ids, 500)
    other, _ = draw(source, ids[1:], 500)
    runs = {tuple(one[i : i + 4]) for i in range(497)}
    assert not runs & {tuple(other[i : i + 4]) for i in range(497)}


def test_many_prompts_give_as_many_answers():
    """10 000 prompts of one id each, and 10 000 request seeds, all begin with different five tokens."""
    source = token_source(32_000, 2, 0)
    by_prompt = {tuple(draw(source, np.array([i], np.int32), 5)[0]) for i in range(10_000)}
    by_seed = {tuple(draw(source, np.array([1], np.int32), 5, seed)[0]) for seed in range(10_000)}
    assert (len(by_prompt), len(by_seed)) == (10_000, 10_000)


def test_different_sources_give_different_answers():
    """The simulator's seed changes the answer."""
    ids = np.array([5, 6, 7], np.int32)
    assert draw(token_source(32_000, 2, 0), ids, 5) != draw(token_source(32_000, 2, 1), ids, 5)


@pytest.mark.parametrize(("vocab", "eos"), VOCABULARIES)
def test_ids_stay_in_the_vocabulary_and_never_end_by_chance(vocab, eos):
    """20 000 drawn ids lie in [0, vocab), none is the end token, and the vocabulary's both ends are used."""
    source = token_source(vocab, eos, 3)
    tokens, log_probs = draw(source, np.array([eos, vocab - 1], np.int32), 20_000)
    assert min(tokens) >= 0
    assert max(tokens) < vocab
    assert eos not in tokens
    assert min(tokens) < vocab * 0.1
    assert max(tokens) > vocab * 0.9
    assert np.isfinite(log_probs).all()
    assert max(log_probs) < 0


def test_tokens_look_uniform():
    """Over 160 000 tokens of many prompts every id of a small vocabulary comes equally often (chi-square, 6 sigma)."""
    source = token_source(97, 96, 0)
    drawn = [draw(source, np.array([i % 90, i // 90], np.int32), 80)[0] for i in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=97)[:89]  # 89 is the largest prime below 97
    expected = 160_000 / 89
    assert ((counts - expected) ** 2 / expected).sum() < 88 + 6 * np.sqrt(2 * 88)


def test_long_sequences_are_exact():
    """Beyond every chunk and table size, the answer to 70 000 ids is the one a continuation from 60 000 gives."""
    source = TokenSource(151_936, 151_645, 0)
    ids = np.random.default_rng(0).integers(0, 151_936, 60_000).astype(np.int32)
    whole = source.tokens(source.state(ids, 1), 0, 12_000)
    longer = np.concatenate([ids, whole[:10_000]])
    assert (TokenSource(151_936, 151_645, 0).tokens(source.state(longer, 1), 0, 2_000) == whole[10_000:]).all()


def test_the_fold_is_the_recurrence_it_claims_to_be():
    """State and first token equal those of the obvious loop in Python integers, one id at a time."""
    source = TokenSource(32_000, 2, 9)
    ids = np.random.default_rng(1).integers(10, 31_900, 3000)
    p = source.prime
    state = source.state(ids.astype(np.int32), 4)
    scale = [pow(int(v), -1, p) for v in source._unscale]
    hashes = [int(h) for h in source._start(4) % p]
    for i, x in enumerate(ids.tolist()):
        r = scale[i] * (x - int(source._pads[0, i]))
        hashes = [(int(base) * h + r) % p for base, h in zip(source._bases, hashes, strict=True)]
    assert state.hashes.tolist() == hashes
    r = sum(int(c) * h for c, h in zip(source._readouts[0], hashes, strict=True))
    n = len(ids)
    assert source.tokens(state, 0, 1)[0] == (r * int(source._unscale[n]) + int(source._pads[0, n])) % p


def test_answers_are_the_same_in_every_process():
    """Another process, with another hash seed, draws the same tokens."""
    code = (
        "import numpy as np; from zagent.engine.sim.tokens import token_source as t; s = t(32000, 2, 0);"
        "print(s.tokens(s.state(np.arange(9, dtype=np.int32), 1), 0, 9).tolist())"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert seen.stdout.strip() == str(draw(token_source(32_000, 2, 0), np.arange(9, dtype=np.int32), 9, 1)[0])
