"""The launcher's line to the broker."""

from __future__ import annotations

import asyncio

import pytest

from support.cluster_in_memory import SECRET, Cluster
from support.virtual_clock import run
from zagent.client.launcher_link import LauncherLink
from zagent.client.services import Services
from zagent.errors import MemberLost, PoolLost


def test_reports_arrive_in_order_on_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are made at once: who exited, then that nobody is left. The callers hear both."""

    async def main() -> None:
        async with Cluster(pools=("box",), latency=0.1) as cluster:
            monkeypatch.setattr(
                "zagent.client.launcher_link.DealerChannel", lambda endpoint, identity: cluster.router.connect(identity)
            )

            end = asyncio.Event()

            async def run(argument: object, call: object) -> None:
                await end.wait()

            await cluster.member("box-0", {"run": run}, pool="box", credits=1)
            services = Services(await cluster.caller(), ["box"])
            runs, waits = (asyncio.ensure_future(services["box"].run()) for _ in range(2))
            await asyncio.sleep(1)
            cluster.core.pools["box"].members["box-0"].facts["idempotent"] = []
            line = LauncherLink("ipc://nowhere", SECRET)
            await asyncio.gather(
                line.exited("box", "box-0", 1, "it exited with code 3"), line.abandoned("box", "no box is left: cheese")
            )
            with pytest.raises(MemberLost, match="it exited with code 3"):
                await runs
            with pytest.raises(PoolLost, match="no box is left: cheese"):
                await waits
            assert len(cluster.core.roster.callers) == 2  # the caller's and one of the launcher's
            await line.close()
            end.set()
            await asyncio.sleep(1)
            assert len(cluster.core.roster.callers) == 1

    run(main())


def test_a_line_that_was_never_used_closes() -> None:
    """It was never opened either."""
    asyncio.run(LauncherLink("ipc://nowhere", SECRET).close())
