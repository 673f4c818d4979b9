"""Seeds follow from what is sampled."""

from __future__ import annotations

import itertools

from zagent.loops.seeds import seed_for


def test_the_value_is_fixed() -> None:
    """A seed is the same on every machine and in every release: the number is SHA-256's."""
    assert seed_for(0, -1, False, "u", 0, 0) == 6482678731825628469


def test_every_argument_matters() -> None:
    """Changing any one of the six gives another seed; all lie in [0, 2**63)."""
    calls = list(itertools.product((0, 1), (-1, 5), (False, True), ("a", "b"), (0, 1), (0, 1)))
    seeds = {seed_for(*call) for call in calls}
    assert len(seeds) == len(calls)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_number_and_its_text_are_one_uid() -> None:
    """A data set may store uids as text or as numbers."""
    assert seed_for(0, 0, False, 7, 0, 0) == seed_for(0, 0, False, "7", 0, 0)
