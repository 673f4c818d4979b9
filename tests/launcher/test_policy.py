"""Decisions about children: pure."""

from __future__ import annotations

import signal

import pytest

from launcher import heartbeat, policy
from launcher.ports import EnginePorts
from launcher.specs import ChildSpec, End, Member, next_life, with_ports
from launcher.startup import check_tokenizers
from support.processes import spec
from zagent.config import LauncherConfig
from zagent.engine import base
from zagent.errors import StartupError

LIMITS = LauncherConfig(max_restarts=2, restart_wait_s=0.5, restart_window_s=100.0)


def ended(at: float = 0.0, *, ready: bool = True, crashed: bool = True) -> End:
    return End(at, ready, crashed)


def on_exit(
    made: ChildSpec, others: int = 0, *, end: End | None = None, limits: LauncherConfig = LIMITS
) -> policy.Decision:
    return policy.on_exit(made, end or ended(), others, limits)


def used_up(room: str) -> ChildSpec:
    """One that has died as often as it may."""
    made = spec(room, "obedient", epoch=1)
    for _ in range(LIMITS.max_restarts):
        made = next_life(made, ended())
    return made


@pytest.mark.parametrize(("room", "wait"), [("engine", 0.5), ("worker", 0.5), ("service", 0.5), ("broker", 0.0)])
def test_whoever_dies_is_started_again(room: str, wait: float) -> None:
    """After `restart_wait_s`; the broker, for whom all wait, at once."""
    assert on_exit(spec(room, "obedient")) == policy.Decision(restart_after_s=wait)


@pytest.mark.parametrize("room", ["engine", "worker", "service"])
def test_a_pool_with_somebody_left_goes_on(room: str) -> None:
    """A process whose budget is used up stays gone; nothing else happens."""
    assert on_exit(used_up(room), others=1) == policy.Decision()


@pytest.mark.parametrize(("room", "end_after_s"), [("engine", 2.0), ("worker", 2.0), ("service", None)])
def test_the_last_one_takes_its_pool_along(room: str, end_after_s: float | None) -> None:
    """And the run, where no row can finish without it, once the callers have heard why."""
    assert on_exit(used_up(room)) == policy.Decision(abandon=True, end_after_s=end_after_s)


def test_a_broker_that_died_too_often_ends_the_run() -> None:
    """At once: nobody is left to be told."""
    assert on_exit(used_up("broker"), others=1) == policy.Decision(end_after_s=0.0)


def test_the_budget_counts_what_lies_within_the_window() -> None:
    """Two restarts within 100 s here: old ones are forgotten one by one, however many they were."""
    made = spec("engine", "obedient", epoch=1)
    for now in (0.0, 50.0):
        assert on_exit(made, end=ended(now)).restart_after_s is not None
        made = next_life(made, ended(now))
    assert on_exit(made, end=ended(99.0)).abandon
    assert on_exit(made, end=ended(100.0)).restart_after_s is not None
    made = next_life(made, ended(100.0))
    assert on_exit(made, end=ended(149.0)).abandon
    assert on_exit(made, end=ended(150.0)).restart_after_s is not None


@pytest.mark.parametrize("room", ["engine", "worker", "service", "broker"])
def test_without_a_budget_nobody_is_started_again(room: str) -> None:
    """`launcher.max_restarts=0`."""
    decision = on_exit(spec(room, "obedient"), limits=LauncherConfig(max_restarts=0))
    assert decision.restart_after_s is None


def test_the_wait_doubles_with_each_failed_start_and_is_reset_once_ready() -> None:
    """0.5 s, 1 s, 2 s … a minute at most, however often; a configured wait beyond that is kept."""
    made = spec("service", "obedient", epoch=1)
    waits = []
    for ready in (False, False, True, False):
        waits.append(on_exit(made, limits=LauncherConfig(max_restarts=9), end=ended(ready=ready)).restart_after_s)
        made = next_life(made, ended(ready=ready))
    assert waits == [1.0, 2.0, 0.5, 1.0]
    assert policy.restart_wait_s("engine", 1000, 0.5) == policy.LONGEST_RESTART_WAIT_S
    assert policy.restart_wait_s("engine", 3, 90.0) == 90.0
    assert [policy.restart_wait_s("broker", failed, 0.5) for failed in (0, 1, 2, 99)] == [0.0, 1.0, 2.0, 2.0]


def test_a_start_that_was_ended_from_outside_does_not_count() -> None:
    """It changes nothing about the wait, neither up nor down; it does count for the budget."""
    made = next_life(spec("engine", "obedient", epoch=1), ended(ready=False))
    killed = ended(ready=False, crashed=False)
    assert on_exit(made, end=killed).restart_after_s == 1.0
    made = next_life(made, killed)
    assert (made.failed_starts, made.life) == (1, 3)
    assert on_exit(made, end=killed).abandon


def test_a_next_life_has_the_next_number() -> None:
    """As the epoch of all members, in the settings as well, in either form; as the broker's incarnation. Nothing else
    changes."""
    members = (Member("judge", "judge-0", 0), Member("judge", "judge-1", 1))
    engines = ChildSpec("judge-0-to-1", "service", "x:y", {"members": [], "seed": 3}, members=members)
    once = next_life(engines, ended(1.0, ready=False))
    assert [m.epoch for m in once.members] == [2, 2]
    assert [(m["name"], m["index"], m["epoch"]) for m in once.settings["members"]] == [
        ("judge-0", 0, 2),
        ("judge-1", 1, 2),
    ]
    assert (once.settings["seed"], once.failed_starts, once.name, once.pool) == (3, 1, engines.name, "judge")
    actor = ChildSpec("s-0", "service", "x:y", {"epoch": 1, "name": "s-0"}, members=(Member("s", "s-0", 0),))
    twice = next_life(next_life(actor, ended(1.0, ready=False)), ended(2.0))
    assert (twice.settings, twice.failed_starts, twice.life) == ({"epoch": 3, "name": "s-0"}, 0, 3)
    broker = next_life(ChildSpec("broker", "broker", "x:y", {"incarnation": 1}), ended(1.0))
    assert (broker.settings, broker.members) == ({"incarnation": 2}, ())


def test_other_ports_reach_the_settings() -> None:
    """An engine's next life is told them, and they are released for it."""
    engine = with_ports(ChildSpec("e", "engine", "x:y", {"nccl_port": 1, "port": 2, "seed": 3}), EnginePorts(7, 8))
    assert engine.settings == {"nccl_port": 7, "port": 8, "seed": 3}
    assert engine.ports == EnginePorts(7, 8)


@pytest.mark.parametrize(
    ("code", "by_itself"),
    [
        *((0, False), (1, True), (3, True), (base.ENGINE_DIED, True), (base.ENGINE_KILLED, False)),
        *((heartbeat.OUT_OF_MEMORY, True), (-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGFPE, True)),
        *((-signal.SIGKILL, False), (-signal.SIGTERM, False), (-signal.SIGINT, False), (-signal.SIGHUP, False)),
        (-40, False),
    ],
)
def test_who_died_by_itself(code: int, by_itself: bool) -> None:
    """An exit code of its own making, or a signal that a process brings upon itself; not what others sent, and not an
    engine whose own child was killed."""
    assert policy.crashed(code) is by_itself


def test_who_hung_died_by_itself() -> None:
    """Although we had to kill it; one that returned in order did not."""
    assert policy.crashed(-signal.SIGKILL, hung=True)
    assert not policy.crashed(0, hung=True)


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
