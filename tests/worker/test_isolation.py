"""One row that misbehaves in its worker's own process: its siblings end as they would without it.

What takes the process along (a crash, a blocked event loop, a flood of memory) is in `end_to_end/test_isolation.py`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.config import RolloutConfig
from zagent.errors import from_wire
from zagent.loops import registry
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.registry import find_loop, register
from zagent.types import AgentLoopOutput
from zagent.wire.codec import decode_body, encode_body
from zagent.worker.runner import AgentLoopWorker

SIBLINGS = 8
TRAJECTORY_TIMEOUT_S = 50.0


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered here are forgotten afterwards."""
    find_loop("single_turn_agent")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def row(index: int, agent: str) -> dict[str, Any]:
    """A row as it arrives over the wire."""
    made = {
        "index": index,
        "uid": f"u{index}",
        "sample": 0,
        "agent_name": agent,
        "kwargs": {"raw_prompt": [{"role": "user", "content": "hi"}]},
        "sampling_params": {"max_new_tokens": 4, "logprobs": True},
        "trajectory": {},
        "seed_key": [0, -1, False, str(index), 0],
    }
    return decode_body(encode_body(made))  # type: ignore[no-any-return]


class Good(AgentLoopBase):
    """Three turns."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids, log_probs = [1], []
        for _ in range(3):
            out = await self.server_manager.generate(self.session, ids, sampling_params)
            ids += [int(token) for token in out.token_ids]
            log_probs += [float(one) for one in out.log_probs if out.log_probs is not None]
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=ids[1:], response_mask=[1] * len(log_probs), response_logprobs=log_probs
        )


Body = Callable[[AgentLoopBase], Awaitable[Any]]


async def raises(self: AgentLoopBase) -> None:
    raise ValueError("made of cheese")


async def exits(self: AgentLoopBase) -> None:
    sys.exit(3)


async def recurses(self: AgentLoopBase) -> None:
    def deeper() -> None:
        deeper()

    deeper()


async def has_no_memory(self: AgentLoopBase) -> None:
    raise MemoryError


async def hangs(self: AgentLoopBase) -> None:
    await asyncio.Event().wait()


async def ignores_its_end(self: AgentLoopBase) -> None:
    end = asyncio.get_running_loop().time() + 4 * TRAJECTORY_TIMEOUT_S
    while asyncio.get_running_loop().time() < end:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(end)


async def leaves_tasks_behind(self: AgentLoopBase) -> None:
    for _ in range(20):
        task = asyncio.ensure_future(raises(self))
        task.add_done_callback(lambda task: task.exception())
    raise LookupError("left them")


async def asks_for_nonsense(self: AgentLoopBase) -> None:
    await self.server_manager.generate("s", [1], {"max_new_tokens": "many"})


async def returns_nonsense(self: AgentLoopBase) -> Any:
    return {"response_ids": object()}


BAD: dict[Body, str] = {
    raises: "ValueError",
    exits: "RemoteError",
    recurses: "RecursionError",
    has_no_memory: "MemoryError",
    hangs: "DeadlineExceeded",
    ignores_its_end: "DeadlineExceeded",
    leaves_tasks_behind: "LookupError",
    asks_for_nonsense: "InvalidRequest",
    returns_nonsense: "LoopError",
}


def bad_loop(body: Body) -> Callable[..., Awaitable[Any]]:
    """A `run` that does one turn, and then what ``body`` does."""

    async def run(self: AgentLoopBase, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        await self.server_manager.generate(self.session, [1], sampling_params)
        return await body(self)

    return run


def outcomes(body: Body | None) -> list[dict[str, Any]]:
    """Of the siblings, and last of a row with ``body``, all at once on one worker with two engines."""

    async def main() -> list[dict[str, Any]]:
        async with Cluster() as cluster:
            for index in range(2):
                await cluster.engine(index, credits=SIBLINGS, decode_tokens_per_s=20)
            register("good")(Good)
            rows = [row(index, "good") for index in range(SIBLINGS)]
            if body is not None:
                register("bad")(type("Bad", (AgentLoopBase,), {"run": bad_loop(body)}))
                rows.append(row(SIBLINGS, "bad"))
            config = TrainerConfig(RolloutConfig(trajectory_timeout_s=TRAJECTORY_TIMEOUT_S), 100_000)
            worker = AgentLoopWorker(await cluster.caller(), None, config)
            made = await asyncio.gather(*(worker.run(one) for one in rows))
            await asyncio.sleep(10 * TRAJECTORY_TIMEOUT_S)
            assert cluster.quiet()
            return decode_body(encode_body(made))  # type: ignore[no-any-return]

    return run(main())


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[list[int]]]:
    """The siblings' tokens without a bad row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
        yield tokens(outcomes(None))


def tokens(made: list[dict[str, Any]]) -> list[list[int]]:
    return [one["output"]["response_ids"].tolist() for one in made]


@pytest.mark.parametrize("body", BAD, ids=lambda body: body.__name__)
def test_siblings_do_not_notice(body: Body, undisturbed: list[list[int]]) -> None:
    """They are `ok` with the same tokens; the bad row has failed, with its own error; nothing stays in flight."""
    *siblings, bad = outcomes(body)
    assert [one["status"] for one in siblings] == ["ok"] * SIBLINGS
    assert tokens(siblings) == undisturbed
    assert bad["status"] == "failed"
    assert type(from_wire(bad["error"])).__name__ == BAD[body]
