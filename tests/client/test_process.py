"""What member processes do around their work."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from support.cluster_in_memory import SECRET, Cluster
from support.virtual_clock import run
from zagent.client.link import Identity
from zagent.client.process import end_cut_off, run_main, stopped
from zagent.wire.messages import Call


def test_a_member_that_is_told_to_stop() -> None:
    """Has no reason but that; its link is open."""

    async def main() -> tuple[str, str]:
        async with Cluster() as cluster:
            link = await cluster.link(Identity("worker", "worker-0", 1, 8, SECRET))
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(5, stop.set)
            return await stopped(stop, link), link.closed

    assert run(main()) == ("", "")


@pytest.mark.parametrize("early", [True, False])
def test_a_member_whose_link_closes_by_itself(early: bool) -> None:
    """Has the link's reason: before it began to wait, or meanwhile."""

    async def main() -> str:
        async with Cluster() as cluster:
            link = await cluster.link(Identity("worker", "worker-0", 1, 8, SECRET))
            if early:
                link.close("the broker refused the hello")
            else:
                asyncio.get_running_loop().call_later(5, link.close, "the broker refused the hello")
            reason = await stopped(asyncio.Event(), link)
            assert asyncio.get_running_loop().time() == pytest.approx(0 if early else 5, abs=0.1)
            return reason

    assert run(main()) == "the broker refused the hello"


def test_a_member_that_is_cut_off_still_ends_what_it_runs() -> None:
    """Its tasks are cancelled, so that they can put away what they hold."""

    async def main() -> list[str]:
        async with Cluster() as cluster:
            ended: list[str] = []

            async def work(argument: Any, call: Call) -> None:
                try:
                    await asyncio.sleep(1000)
                finally:
                    ended.append("put away")

            member = await cluster.member("m", {"work": work})
            calling = asyncio.create_task((await cluster.caller()).call("engine", "work"))
            await asyncio.sleep(1)
            cluster.links[0].close("it was removed")
            await member.leave("it was removed")
            calling.cancel()
            await asyncio.wait([calling])
            return ended

    assert run(main()) == ["put away"]


def test_the_end_of_a_member_that_is_cut_off(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and a line that says why; no clean-up that could hang."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_cut_off("worker-0", "it was removed")
    assert codes == [1]
    assert capfd.readouterr().err == "worker-0 ends, cut off from the broker: it was removed\n"


@pytest.mark.parametrize("installed", [True, False])
def test_the_event_loop_is_uvloops_where_that_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asyncio's where it is not."""
    made: list[asyncio.AbstractEventLoop] = []

    def new_event_loop() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[0]

    uvloop = SimpleNamespace(new_event_loop=new_event_loop) if installed else None  # None: its import fails
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)

    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert [run_main(main())] == made if installed else isinstance(run_main(main()), asyncio.SelectorEventLoop)
    assert len(made) == installed
