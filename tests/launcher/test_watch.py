"""Who is slow, and who hangs: on virtual time, with children that only look alive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from launcher.health import SLOW_S, Health, Signs, judge
from launcher.watch import STUCK_S, Watch
from support.virtual_clock import run


class Beating:
    """A child by looks: beats until ``silent_from``, with a lag that grows from ``lags_from`` to ``lags_to``."""

    def __init__(self, name: str = "engine-0", **times: float) -> None:
        self.spec = SimpleNamespace(name=name)
        self.loop = asyncio.get_running_loop()
        self.died: asyncio.Future[int] = self.loop.create_future()
        self.times = times
        self.given_up = ""

    def signs(self) -> Signs:
        now, never = self.loop.time(), float("inf")
        silent = max(0.0, now - self.times.get("silent_from", never))
        began, ends = self.times.get("lags_from", never), self.times.get("lags_to", never)
        return Signs(silent, now - began if began <= now < ends else 0.0, "a tool")

    def give_up(self, why: str) -> None:
        assert not self.given_up
        self.given_up = why


Said = list[tuple[float, str, bool]]


def watch(
    make: Callable[[], list[Beating]], until_s: float, during: Callable[[list[Beating]], Awaitable[None]] | None = None
) -> tuple[Said, list[tuple[float, str]], list[Beating]]:
    """Watch those for ``until_s`` seconds with `hung_after_s` 60: what was told, who was stuck, and they."""
    said: Said = []
    stuck: list[tuple[float, str]] = []

    async def main() -> list[Beating]:
        loop, children = asyncio.get_running_loop(), make()
        watching = Watch(
            lambda: [child for child in children if not child.died.done()],  # type: ignore[misc]
            60.0,
            lambda child, slow: said.append((loop.time(), child.spec.name, slow)),
            lambda child: stuck.append((loop.time(), child.spec.name)),
        )
        if during is not None:
            await during(children)
        await asyncio.sleep(until_s - loop.time())
        watching.stop()
        await asyncio.sleep(100)
        assert {*watching._slow, *watching._given_up} <= {child for child in children if not child.died.done()}
        return children

    return said, stuck, run(main())


def test_judgement() -> None:
    """Slow beyond three beats, hung beyond the limit: by either sign, but only what we have seen ourselves."""
    found = [judge(Signs(stalled), 1000.0, 60.0) for stalled in (0.0, SLOW_S, SLOW_S + 0.1, 59.9, 60.0)]
    assert found == [Health.WELL, Health.WELL, Health.SLOW, Health.SLOW, Health.HUNG]
    assert judge(Signs(0.0, 60.0), 57.0, 60.0) is Health.HUNG
    assert judge(Signs(0.0, 3.5), 1000.0, 60.0) is Health.SLOW
    assert judge(Signs(300.0, 300.0), 0.0, 60.0) is Health.SLOW
    assert judge(Signs(10.0), 0.0, 5.0) is Health.SLOW  # it was we who were stopped
    assert judge(Signs(5.0), 2.0, 5.0) is Health.HUNG


def test_words() -> None:
    """They say what is known."""
    assert str(Signs(4.2, 1.0)) == "nothing was heard of it for 4 s"
    assert str(Signs(0.2, 12.0, "the tokenizer")) == "the tokenizer kept everything else waiting for 12 s"
    assert "something kept" in str(Signs(0.2, 12.0))


def test_whoever_is_well_is_left_alone() -> None:
    """Nothing is said, however long."""
    said, stuck, (child,) = watch(lambda: [Beating()], 1000.0)
    assert (said, stuck, child.given_up) == ([], [], "")


@pytest.mark.parametrize("lag", [9.0, 50.0])
def test_one_that_was_busy_is_spared_not_killed(lag: float) -> None:
    """It is slow after three seconds, once, and well again when it is done."""
    said, _, (child,) = watch(lambda: [Beating(lags_from=10.5, lags_to=10.5 + lag)], 200.0)
    assert said == [(14.0, "engine-0", True), (pytest.approx(11.0 + lag), "engine-0", False)]
    assert child.given_up == ""


def test_many_short_stalls_are_no_hang() -> None:
    """However long they go on: each ends."""

    async def lag_again_and_again(children: list[Beating]) -> None:
        for _ in range(20):
            begun = children[0].loop.time()
            children[0].times.update(lags_from=begun, lags_to=begun + 10)
            await asyncio.sleep(10)

    _, _, (child,) = watch(lambda: [Beating()], 300.0, lag_again_and_again)
    assert child.given_up == ""


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"silent_from": 10.5}, "it hung: nothing was heard of it for 60 s"),
        ({"lags_from": 10.5}, "it hung: a tool kept everything else waiting for 60 s"),
    ],
)
def test_one_that_hangs_is_given_up(times: dict[str, float], why: str) -> None:
    """A minute after its last sign of life, once; others beside it are not touched."""
    said, stuck, (hung, other) = watch(lambda: [Beating(**times), Beating("other")], 75.5)
    assert (said, stuck) == ([(14.0, "engine-0", True)], [])
    assert (hung.given_up, other.given_up) == (why, "")


def test_one_that_cannot_even_be_killed_is_told() -> None:
    """The kernel holds it: its calls need not wait for it. One that ended in time is not."""

    async def end_one(children: list[Beating]) -> None:
        await asyncio.sleep(72)
        children[0].died.set_result(-6)

    _, stuck, _ = watch(lambda: [Beating("ends", silent_from=10.5), Beating("stays", silent_from=10.5)], 90.0, end_one)
    assert stuck == [(71.0 + STUCK_S, "stays")]


def test_the_dead_are_forgotten() -> None:
    """A slow one that dies is not told to be well again, nor kept in mind."""

    async def die(children: list[Beating]) -> None:
        await asyncio.sleep(20)
        children[0].died.set_result(-9)

    said, _, _ = watch(lambda: [Beating(silent_from=10.5)], 200.0, die)
    assert said == [(14.0, "engine-0", True)]


def test_a_machine_that_slept_kills_nobody() -> None:
    """Everybody was silent for ten minutes, and so were we: also one that was slow before; then they go on."""

    async def sleep(children: list[Beating]) -> None:
        await asyncio.sleep(20.2)
        children[0].loop._jump.now += 600  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        for child in children:
            child.times.clear()

    said, _, children = watch(lambda: [Beating(silent_from=10.5), Beating("other", silent_from=20.1)], 800.0, sleep)
    assert [child.given_up for child in children] == ["", ""]
    assert {name for _, name, slow in said if not slow} == {"engine-0", "other"}
