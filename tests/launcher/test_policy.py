"""Decisions about children: pure."""

from __future__ import annotations

import pytest

from launcher import policy
from launcher.specs import ChildSpec, Member, next_life
from launcher.startup import check_tokenizers
from support.processes import spec
from zagent.config import LauncherConfig
from zagent.errors import StartupError

LIMITS = LauncherConfig(max_restarts=2, restart_wait_s=0.5)


def on_exit(made: ChildSpec, others: int = 0, *, became_ready: bool = True) -> policy.Decision:
    return policy.on_exit(made, others, LIMITS, became_ready=became_ready)


def test_death_of_one_of_many_is_reported_and_survived() -> None:
    """The broker is told about its members; the run goes on."""
    engine = spec("engine", "obedient")
    assert on_exit(engine, others=1) == policy.Decision(report=engine.members)


@pytest.mark.parametrize("room", ["engine", "worker"])
def test_death_of_the_last_of_a_room_ends_the_run(room: str) -> None:
    """Without engines, or without workers, nothing can be finished; they are not started again."""
    made = spec(room, "obedient")
    assert on_exit(made) == policy.Decision(report=made.members, end=True)


def test_death_of_the_broker_ends_the_run() -> None:
    """Nobody is left to be told."""
    assert on_exit(spec("broker", "obedient"), others=1) == policy.Decision(end=True)


def test_a_service_is_started_again_until_its_budget_is_used_up() -> None:
    """Twice here; then it stays gone, and the last one's pool is given up. The run goes on in any case."""
    made = spec("service", "obedient")
    for _ in range(LIMITS.max_restarts):
        assert on_exit(made) == policy.Decision(report=made.members, restart_after_s=0.5)
        made = next_life(made, became_ready=True)
    assert on_exit(made, others=1) == policy.Decision(report=made.members)
    assert on_exit(made) == policy.Decision(report=made.members, abandon=True)


def test_without_a_budget_a_service_is_not_started_again() -> None:
    """`launcher.max_restarts=0`."""
    none = LauncherConfig(max_restarts=0)
    assert policy.on_exit(spec("service", "obedient"), 0, none, became_ready=True).abandon


def test_the_wait_doubles_with_each_failed_start_and_is_reset_once_ready() -> None:
    """0.5 s, 1 s, 2 s … a minute at most, however often; a configured wait beyond that is kept."""
    made = spec("service", "obedient")
    waits = []
    for ready in (False, False, True, False):
        waits.append(policy.on_exit(made, 0, LauncherConfig(max_restarts=9), became_ready=ready).restart_after_s)
        made = next_life(made, became_ready=ready)
    assert waits == [1.0, 2.0, 0.5, 1.0]
    assert policy.restart_wait_s(1000, 0.5) == policy.LONGEST_RESTART_WAIT_S
    assert policy.restart_wait_s(3, 90.0) == 90.0


def test_a_next_life_has_the_next_epoch() -> None:
    """Of all members, in the settings as well, in either form; nothing else changes."""
    members = (Member("judge", "judge-0", 0), Member("judge", "judge-1", 1))
    engines = ChildSpec("judge-0-to-1", "service", "x:y", {"members": [], "seed": 3}, members=members)
    once = next_life(engines, became_ready=False)
    assert [m.epoch for m in once.members] == [2, 2]
    assert [(m["name"], m["index"], m["epoch"]) for m in once.settings["members"]] == [
        ("judge-0", 0, 2),
        ("judge-1", 1, 2),
    ]
    assert (once.settings["seed"], once.failed_starts, once.name, once.pool) == (3, 1, engines.name, "judge")
    actor = ChildSpec("s-0", "service", "x:y", {"epoch": 1, "name": "s-0"}, members=(Member("s", "s-0", 0),))
    twice = next_life(next_life(actor, became_ready=False), became_ready=True)
    assert (twice.settings, twice.failed_starts) == ({"epoch": 3, "name": "s-0"}, 0)


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
