"""The arithmetic that all benchmarks share."""

from __future__ import annotations

import math

from benchmarks.suite import Figure, cases, markdown, median, missing, peers, ratios, spread


def figure(peer: str, repeat: int, value: float, *, case: str = "small", name: str = "calls_per_s") -> Figure:
    return Figure("relay", case, peer, repeat, name, value, "1/s")


FIGURES = [
    figure("zagent", 0, 10.0),
    figure("sockets", 0, 20.0),
    figure("zagent", 1, 30.0),
    figure("sockets", 1, 40.0),
    figure("zagent", 2, 500.0),
    figure("zagent", 0, 1.0, case="large"),
    figure("zagent", 0, 2.0, name="p50_ms"),
]


def test_ratios_are_taken_within_a_repeat():
    """Not of medians; a repeat that only one of the two has gives none."""
    assert ratios(FIGURES, case="small", name="calls_per_s", under="sockets") == [0.5, 0.75]


def test_ratios_go_either_way():
    """Ray's seconds over ours are how many times longer it takes."""
    found = ratios(iter(FIGURES), case="small", name="calls_per_s", over="sockets", under="zagent")
    assert found == [2.0, 40 / 30]


def test_a_median_is_of_one_case_peer_and_name():
    """Other cases and names do not mix in; nothing measured is no number."""
    assert median(FIGURES, case="small", peer="zagent", name="calls_per_s") == 30.0
    assert median(FIGURES, case="large", peer="zagent", name="calls_per_s") == 1.0
    assert math.isnan(median(FIGURES, case="large", peer="sockets", name="calls_per_s"))


def test_cases_and_peers_keep_their_order():
    """As they were measured, each once."""
    assert cases(FIGURES) == ["small", "large"]
    assert peers(FIGURES) == ["zagent", "sockets"]


def test_spread_shows_the_middle_and_both_ends():
    """The median first; a dash where nothing was measured."""
    assert spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0–3.0)"
    assert spread([]) == "–"


def test_markdown_aligns_numbers_to_the_right():
    """One header, one row."""
    assert markdown(["case", "ratio"], [["small", "0.5"]]) == "| case | ratio |\n| --- | ---: |\n| small | 0.5 |"


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch):
    """Peers of Python's own and of zagent's dependencies are always there."""
    monkeypatch.setattr("benchmarks.suite.importlib.util.find_spec", lambda module: None)
    assert missing("ray-global") == "ray is not installed: pip install -e '.[bench]'"
    assert missing("sglang-router") == "sglang-router is not installed: pip install -e '.[bench]'"
    assert missing("sockets") is None


def test_a_peer_that_is_installed_is_not_missing(monkeypatch):
    """Found means usable."""
    monkeypatch.setattr("benchmarks.suite.importlib.util.find_spec", lambda module: object())
    assert missing("ray") is None
