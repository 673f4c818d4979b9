"""What a manager asks of the cluster beside rollouts: the broker's counts, and calls to members by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from zagent.client.calls import Calls
from zagent.errors import DeadlineExceeded, InvalidRequest, MemberLost, PoolLost
from zagent.trainer.rollout import WORKER_POOL
from zagent.wire.codec import encode_body
from zagent.wire.messages import BROKER

#: Seconds a control call may take; an engine that is busy answers it all the same.
CONTROL_TIMEOUT_S = 30.0
#: Pause between two looks for a member that answers, in seconds.
LOOK_S = 0.2


class Control:
    """Control calls over ``calls``; all methods on its loop."""

    def __init__(self, calls: Calls, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep) -> None:
        self._calls = calls
        self._sleep = sleep
        self._pad_token_id: int | None = None

    async def broker(self, method: str, argument: Any = None) -> Any:
        """One of the broker's own methods."""
        return await self._calls.call(BROKER, method, argument, timeout=CONTROL_TIMEOUT_S)

    async def status(self) -> dict[str, Any]:
        """The broker's counts. One that has been started again is waited for: it has none before its members are back,
        nor their version."""
        while (status := await self.broker("status"))["recovering"]:
            await self._sleep(LOOK_S)
        return status  # type: ignore[no-any-return]

    async def remove(self, pool: str, name: str, epoch: int | None = None) -> None:
        """Take a member out, if it is there; in that life, if it is named."""
        with suppress(InvalidRequest):
            await self.broker("remove", [pool, name, epoch])

    @asynccontextmanager
    async def beside(self, pool: str, method: str, *, timeout: float) -> AsyncIterator[None]:
        """``method`` runs on every live member meanwhile, at most ``timeout`` seconds. It is cancelled then, also where
        this process ends before."""
        names = await self._alive(pool)
        calls = [asyncio.ensure_future(self._on(pool, name, method, timeout=timeout)) for name in names]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def on_members(self, pool: str, method: str, argument: Any = None) -> dict[str, Any]:
        """Call ``method`` on every live member of ``pool``; by name. Raises what the first failing one raised, and
        `MemberLost` where there is none."""
        results = await self.try_members(pool, method, argument)
        if not results:
            raise MemberLost(f"no live member in pool {pool!r}")
        return _first_raised(results)

    async def try_members(
        self,
        pool: str,
        method: str,
        argument: Any = None,
        *,
        names: Sequence[str] | None = None,
        timeout: float = CONTROL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Call ``method`` on every live member of ``pool``, or on those ``names``; results by name, and exceptions in
        their place."""
        names = await self._alive(pool) if names is None else names
        return await self._each(pool, method, dict.fromkeys(names, argument), timeout)

    async def on_each(self, pool: str, method: str, arguments: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Call ``method`` on the members named, each with its argument. Raises what the first failing one raised."""
        return _first_raised(await self._each(pool, method, arguments, timeout))

    async def _each(self, pool: str, method: str, arguments: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        for argument in arguments.values():
            encode_body(argument)  # what cannot cross the wire is no member's failure: raised before anybody is asked
        calls = (self._on(pool, name, method, argument, timeout) for name, argument in arguments.items())
        return dict(zip(arguments, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def epochs(self, pool: str) -> dict[str, int]:
        """Of the members that are there, by name."""
        members = (await self.status())["pools"][pool]
        return {name: member["epoch"] for name, member in members.items() if member["state"] != "dead"}

    async def there(self, pool: str, timeout: float) -> dict[str, int]:
        """`epochs`; where nobody is there, of those that come within ``timeout`` seconds. Raises `PoolLost` where
        nobody will."""
        if members := await self.epochs(pool):
            return members
        # Any balanced call hears of an abandoned pool; it may otherwise wait for as long as the gate is closed.
        asking = asyncio.ensure_future(self._calls.call(pool, "stats", timeout=timeout))
        try:
            async with asyncio.timeout(timeout):
                while not (members := await self.epochs(pool)):
                    if asking.done() and isinstance(error := asking.exception(), PoolLost):
                        raise error
                    await self._sleep(LOOK_S)
        except TimeoutError:
            return {}
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return members

    async def pad_token_id(self) -> int:
        """The padding id: the tokenizer's, which only the workers have loaded. Asked once, of whichever worker answers,
        past its credits. Raises `DeadlineExceeded` where none does, though they are started again when they die."""
        if self._pad_token_id is None:
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    about = await self._ask_any(WORKER_POOL, "about")
            except TimeoutError:
                text = f"no worker said within {CONTROL_TIMEOUT_S:.0f} s what its padding token is"
                raise DeadlineExceeded(text) from None
            self._pad_token_id = int(about["pad_token_id"])
        return self._pad_token_id

    async def _ask_any(self, pool: str, method: str) -> Any:
        while True:
            for name in await self._alive(pool):
                try:
                    return await self._on(pool, name, method)
                except MemberLost:  # it died meanwhile: the next one knows as well
                    continue
            await self._sleep(LOOK_S)

    async def _alive(self, pool: str) -> list[str]:
        return list(await self.epochs(pool))

    async def _on(
        self, pool: str, name: str, method: str, argument: Any = None, timeout: float = CONTROL_TIMEOUT_S
    ) -> Any:
        return await self._calls.call(pool, method, argument, member=name, timeout=timeout)


def _first_raised(results: dict[str, Any]) -> dict[str, Any]:
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return results
