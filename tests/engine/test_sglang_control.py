"""SGLang's control plane with a tokenizer manager made by hand, on virtual time and without sglang."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.engine.base import Death
from zagent.engine.sglang_control import NOT_FLUSHED, SGLangControl
from zagent.errors import EngineError

REQUESTS = (
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
    "UpdateWeightFromDiskReqInput",
    "CheckWeightsReqInput",
)


@pytest.fixture(autouse=True)
def _requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's requests as plain namespaces."""
    made = ModuleType("io_struct")
    for name in REQUESTS:
        setattr(made, name, lambda _name=name, **fields: SimpleNamespace(kind=_name, **fields))
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", made)


class FakeLife:
    """Of an engine that may die."""

    def __init__(self) -> None:
        self.died: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def keep(self, task: Any) -> Any:
        return task


class FakeManager:
    """Calls in flight by id, each with the number of aborts that it takes to end it; what it was asked, in order."""

    def __init__(self, calls: dict[str, int] | None = None, *, seconds: float = 1.0) -> None:
        self.rid_to_state = dict(calls or {})
        self.asked: list[Any] = []
        self.frozen = False
        self.answers: dict[str, Any] = {}
        self.seconds = seconds

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self.asked.append("abort")
        self._pass_on() if not self.frozen else None

    def _pass_on(self) -> None:
        self.rid_to_state = {rid: left - 1 for rid, left in self.rid_to_state.items() if left > 1}

    async def pause_generation(self, request: Any) -> None:
        self.asked.append(("pause", request.mode))
        self.frozen = True

    async def continue_generation(self, request: Any) -> None:
        assert request.torch_empty_cache is False  # it would ask CUDA
        self.asked.append("continue")
        self.frozen = False
        if "abort" in self.asked:
            self._pass_on()

    async def update_weights_from_disk(self, request: Any) -> Any:
        self.asked.append(request)
        await asyncio.sleep(self.seconds)
        return (*self.answers["update"], 0)

    async def check_weights(self, request: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return self.answers["check"]


def control(manager: FakeManager, timeout_s: float = 60.0) -> tuple[SGLangControl, FakeLife]:
    life = FakeLife()
    return SGLangControl(manager, life, timeout_s), life  # type: ignore[arg-type]


def test_an_abort_goes_on_until_nobody_is_left() -> None:
    """Whoever is missed by a round hears of the next."""

    async def main() -> None:
        manager = FakeManager({"a": 1, "b": 3})
        made, _ = control(manager)
        await made.pause("abort")
        assert (manager.rid_to_state, manager.asked) == ({}, ["abort"] * 3)
        assert made.entrance.mode == "abort"
        await made.resume()
        assert made.entrance.mode is None

    run(main())


def test_a_call_that_is_just_being_handed_over_is_aborted_too() -> None:
    """It has passed the entrance, but SGLang does not know it when the abort comes."""

    async def main() -> None:
        manager = FakeManager()
        made, _ = control(manager)
        asyncio.get_running_loop().call_later(0.01, lambda: manager.rid_to_state.update({"late": 1}))
        await made.pause("abort")
        await asyncio.sleep(1)
        assert manager.rid_to_state == {}

    run(main())


def test_an_abort_ends_what_stands_still() -> None:
    """SGLang tells frozen calls of an abort when they go on: it is told first, so that they do not go on for long."""

    async def main() -> None:
        manager = FakeManager({"a": 1})
        made, _ = control(manager)
        await made.pause("in_place")
        await made.pause("abort")
        assert manager.asked == [("pause", "in_place"), "abort", "continue"]
        assert (manager.rid_to_state, made.entrance.mode) == ({}, "abort")
        await made.resume()
        assert manager.asked[-1] == "continue"
        assert manager.asked.count("continue") == 1

    run(main())


def test_a_freeze_lets_nobody_in_and_goes_on() -> None:
    """Calls wait at the entrance meanwhile; without a pause nothing is asked."""

    async def main() -> None:
        manager = FakeManager({"a": 1})
        made, _ = control(manager)
        await made.resume()
        assert manager.asked == []
        await made.pause("in_place")
        assert made.entrance.mode == "in_place"
        await made.resume()
        assert (manager.asked, made.entrance.mode) == ([("pause", "in_place"), "continue"], None)
        assert manager.rid_to_state == {"a": 1}

    run(main())


def test_an_engine_that_dies_is_not_aborted_for_ever() -> None:
    """`EngineError` with the reason."""

    async def main() -> None:
        made, life = control(FakeManager({"a": 10**9}))
        asyncio.get_running_loop().call_later(3, life.died.set_result, Death("it fell over", True))
        with pytest.raises(EngineError, match="it fell over"):
            await made.pause("abort")

    run(main())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((True, "fine"), None),
        ((False, f"Weights were updated, but {NOT_FLUSHED} since requests are pending"), None),
        ((False, "no such file"), "failed: no such file"),
    ],
)
def test_weights_from_disk(answer: tuple[bool, str], error: str | None) -> None:
    """Asked for with the version as text, so that tokens carry it. Weights that are new, beside a cache that is not
    empty, are no failure."""

    async def main() -> None:
        manager = FakeManager()
        manager.answers["update"] = answer
        made, _ = control(manager)
        if error is None:
            await made.update_from_disk("/w", 7, flush=True)
        else:
            with pytest.raises(EngineError, match=error):
                await made.update_from_disk("/w", 7, flush=True)
        (request,) = manager.asked
        assert (request.model_path, request.weight_version, request.flush_cache) == ("/w", "7", True)

    run(main())


def test_an_update_that_takes_too_long_is_an_error() -> None:
    """After `engine.update_timeout_s`, and not before."""

    async def main() -> float:
        manager = FakeManager(seconds=100)
        manager.answers["update"] = True, ""
        made, _ = control(manager, timeout_s=30)
        with pytest.raises(EngineError, match="not answered update_weights_from_disk within 30 s"):
            await made.update_from_disk("/w", 1, flush=False)
        took = asyncio.get_running_loop().time()
        await asyncio.sleep(100)  # it is never cancelled: its answer would go to the next
        return took

    assert run(main()) == 30


def test_questions_follow_each_other() -> None:
    """SGLang has one of each kind under way at most."""

    async def main() -> float:
        manager = FakeManager()
        manager.answers["check"] = True, "", [{"checksums": {"w": "1"}}], ""
        made, _ = control(manager)
        await asyncio.gather(*(made.checksum() for _ in range(3)))
        return asyncio.get_running_loop().time()

    assert run(main()) == 3.0


def test_a_checksum_is_of_all_parameters_and_ranks() -> None:
    """Names in any order; another value, name or rank gives another one."""

    async def main() -> None:
        manager = FakeManager(seconds=0)
        made, _ = control(manager)

        async def checksum(*ranks: dict[str, str]) -> str:
            manager.answers["check"] = True, "", [{"checksums": rank} for rank in ranks], ""
            return await made.checksum()

        same = await checksum({"a": "1", "b": "2"})
        assert same == await checksum({"b": "2", "a": "1"})
        others = [({"a": "2", "b": "1"},), ({"a": "1", "c": "2"},), ({"a": "1"}, {"b": "3"})]
        assert len({same, *[await checksum(*other) for other in others]}) == 4
        manager.answers["check"] = False, "not now", [], ""
        with pytest.raises(EngineError, match="no checksum: not now"):
            await made.checksum()

    run(main())
