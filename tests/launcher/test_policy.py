"""Decisions about children: pure."""

from __future__ import annotations

import pytest

from launcher import policy
from launcher.startup import check_tokenizers
from support.processes import spec
from zagent.errors import StartupError


def test_death_of_one_of_many_is_reported_and_survived() -> None:
    """The broker is told about its members; the run goes on."""
    engine = spec("engine", "obedient")
    assert policy.on_exit(engine, others_alive=1) == policy.Decision(report=engine.members)


def test_death_of_the_last_of_a_room_ends_the_run() -> None:
    """Without engines, or without workers, nothing can be finished."""
    assert policy.on_exit(spec("worker", "obedient"), others_alive=0).end


def test_death_of_the_broker_ends_the_run() -> None:
    """Nobody is left to be told."""
    assert policy.on_exit(spec("broker", "obedient"), others_alive=0) == policy.Decision(end=True)


def test_without_a_trainer_stopping_stays_within_five_seconds() -> None:
    """Whatever the configuration allows; KILL and sweep included."""
    total = sum(policy.stop_timeout_s(room, 60.0, orphaned=True) for room in policy.STOP_ORDER)
    assert total <= 2.0
    assert policy.stop_timeout_s("engine", 60.0, orphaned=False) == 60.0
    assert policy.stop_timeout_s("engine", 0.1, orphaned=True) == 0.1


def test_tokenizers_that_agree_or_say_nothing_pass() -> None:
    """An empty probe is no opinion."""
    check_tokenizers({"engine-0": {"tokenizer_probe": "a"}, "worker-0": {"tokenizer_probe": "a"}, "engine-1": {}})
    check_tokenizers({"engine-0": {"tokenizer_probe": ""}, "worker-0": {"tokenizer_probe": "a"}})
    check_tokenizers({})


def test_tokenizers_that_disagree_are_refused() -> None:
    """The error names both members and the way out."""
    infos = {"engine-0": {"tokenizer_probe": "a"}, "engine-1": {}, "worker-0": {"tokenizer_probe": "b"}}
    with pytest.raises(StartupError, match=r"engine-0 and worker-0 tokenize differently.*use_auto_tokenizer=true"):
        check_tokenizers(infos)
