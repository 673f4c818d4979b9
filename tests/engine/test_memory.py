"""What may follow what when an engine gives memory back and takes it again."""

from __future__ import annotations

import pytest

from zagent.engine.memory import Memory
from zagent.errors import StateError


@pytest.mark.parametrize(
    ("mode", "level", "tags"),
    [
        ("hybrid", None, ["weights", "kv_cache"]),
        ("hybrid", 2, ["weights", "kv_cache"]),
        ("hybrid", 1, ["kv_cache"]),
        ("standalone", None, ["kv_cache"]),
        ("standalone", 2, ["kv_cache"]),
        ("standalone", 1, ["kv_cache"]),
    ],
)
def test_levels(mode: str, level: int | None, tags: list[str]) -> None:
    """Level 2 releases the weights as well, of engines that share the trainer's GPUs."""
    memory = Memory(mode)
    assert memory.sleep(level, in_flight=0) == tags
    assert memory.released == set(tags)
    assert "released" in memory.missing


def test_the_whole_cycle_in_sglangs_order() -> None:
    """Weights, their update, KV; then calls are served again."""
    memory = Memory("hybrid")
    memory.sleep(2, in_flight=0)
    assert memory.wake_up(["weights"]) == ["weights"]
    assert "kv_cache is released" in memory.missing
    assert memory.lacks == ["kv_cache", "update"]
    memory.check_update()
    memory.updated()
    assert memory.wake_up(None) == ["kv_cache"]
    assert (memory.missing, memory.lacks) == ("", [])


def test_released_weights_are_garbage_until_they_are_sent_again() -> None:
    """Also when all memory is back, and after another sleep that leaves them alone."""
    memory = Memory("hybrid")
    memory.sleep(None, in_flight=0)
    assert memory.wake_up(None) == ["weights", "kv_cache"]
    assert "garbage" in memory.missing
    memory.sleep(1, in_flight=0)
    memory.wake_up(None)
    assert memory.lacks == ["update"]
    memory.updated()
    assert memory.missing == ""


def test_weights_that_are_kept_come_back_as_they_were() -> None:
    """SGLang's backup in the host's memory."""
    memory = Memory("hybrid", keeps_weights=True)
    memory.sleep(2, in_flight=0)
    memory.wake_up(None)
    assert memory.missing == ""


def test_sleep_needs_an_idle_engine() -> None:
    """SGLang would die; the engine stays awake."""
    memory = Memory("hybrid")
    with pytest.raises(StateError, match="3 calls run"):
        memory.sleep(2, in_flight=3)
    assert memory.missing == ""


@pytest.mark.parametrize("level", [0, 3, "2"])
def test_there_are_two_levels(level: object) -> None:
    """Nothing else is taken for one."""
    memory = Memory("hybrid")
    with pytest.raises(StateError, match="levels 1"):
        memory.sleep(level, in_flight=0)  # type: ignore[arg-type]


def test_nobody_sleeps_twice() -> None:
    """Nor deeper than before."""
    memory = Memory("hybrid")
    memory.sleep(1, in_flight=0)
    with pytest.raises(StateError, match="sleeps already: kv_cache is released"):
        memory.sleep(2, in_flight=0)
    assert memory.released == {"kv_cache"}


def test_only_what_is_released_is_restored() -> None:
    """SGLang would die of more; an engine that is further awake than asked has done what it was asked for."""
    memory = Memory("hybrid")
    assert memory.wake_up(None) == memory.wake_up(["kv_cache"]) == []
    memory.sleep(1, in_flight=0)
    assert memory.wake_up(["weights"]) == []
    with pytest.raises(StateError, match="no memory called 'cuda'"):
        memory.wake_up(["cuda"])
    assert memory.released == {"kv_cache"}


def test_what_could_not_be_restored_is_released_still() -> None:
    """It may be tried again."""
    memory = Memory("standalone")
    memory.sleep(1, in_flight=0)
    memory.not_restored(memory.wake_up(None))
    assert memory.lacks == ["kv_cache"]
    assert memory.wake_up(["kv_cache"]) == ["kv_cache"]


def test_weights_come_before_kv() -> None:
    """Their update needs the room that KV would take."""
    memory = Memory("hybrid")
    memory.sleep(2, in_flight=0)
    with pytest.raises(StateError, match="weights come before kv_cache"):
        memory.wake_up(["kv_cache"])
    assert memory.released == {"weights", "kv_cache"}


def test_new_weights_need_room() -> None:
    """They cannot be brought while that of the weights is released; KV does not matter."""
    memory = Memory("hybrid")
    memory.sleep(2, in_flight=0)
    with pytest.raises(StateError, match=r"wake_up\(\['weights'\]\) comes before"):
        memory.check_update()
    memory.wake_up(["weights"])
    memory.check_update()
