"""The processes around a broker under load: members that answer at once, and a caller. They speak the broker's protocol
with nothing above it, so that two cores are enough to keep it busy."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.scale.load import Done, Load, Pile
from zagent.broker import server
from zagent.client.calls import Calls
from zagent.client.link import Identity, Link
from zagent.client.llm_client import pack_output
from zagent.types import TokenOutput
from zagent.wire.channel import Frames
from zagent.wire.codec import encode_body
from zagent.wire.messages import BROKER, Call, Reply
from zagent.wire.sockets import DealerChannel

SECRET = "scale"
#: Calls that one member takes: more than all that are ever in flight.
CREDITS = 100_000
#: Tokens of an answer.
ANSWER = 128
#: Calls that go out before the loop turns.
HANDFUL = 1000
#: A pool without members.
NOBODY = "worker"


def broker(settings: dict[str, Any], line: Connection) -> None:
    """Entry point: zagent's broker. Says its `endpoint` and `pid`."""
    made = {
        "endpoint": settings["endpoint"],
        "secret": SECRET,
        "pools": ["engine", NOBODY],
        "max_pending": CREDITS,
        "sticky_cache_size": 10_000,
        "incarnation": 1,
        "info": {},
    }
    server.main(made, lambda info: line.send({**info, "pid": os.getpid()}))


def members(settings: dict[str, Any], line: Connection) -> None:
    """Entry point: the engines ``settings["names"]`` of the broker at ``settings["endpoint"]``."""
    asyncio.run(_members(settings, line))


async def _members(settings: dict[str, Any], line: Connection) -> None:
    ids = np.arange(ANSWER, dtype=np.int32)
    body = encode_body(pack_output(TokenOutput(ids, -ids.astype(np.float32), versions=[(0, 0, ANSWER)])))
    for name in settings["names"]:
        link = Link(partial(DealerChannel, settings["endpoint"]), Identity("engine", name, 1, CREDITS, SECRET))
        link.on(Call, partial(_answer, link, body))
        await link.open()
        link.keep()
    line.send("ready")
    await asyncio.Event().wait()


def _answer(link: Link, answer: Frames, call: Call, body: Frames) -> None:
    link.send(Reply(call.call, call.attempt), answer)


def caller(settings: dict[str, Any], line: Connection) -> None:
    """Entry point: a `Done` for each `Load` or `Pile` received."""
    asyncio.run(_caller(settings, line))


async def _caller(settings: dict[str, Any], line: Connection) -> None:
    connect = partial(DealerChannel, settings["endpoint"])
    driver, control = Driver(Link(connect)), Link(connect)
    calls = Calls(control)
    await driver.link.open()
    await control.open()
    line.send("ready")
    while True:
        wanted = line.recv()
        line.send(await driver.run(wanted) if isinstance(wanted, Load) else await driver.pile(wanted, calls))


class Driver:
    """Sends calls over ``link`` and counts what comes back."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._number = self._sent = self._left = self._wrong = 0
        self._waiting: set[bytes] = set()
        self._piled = 0
        link.on(Reply, self._answered)

    async def run(self, load: Load) -> Done:
        """All calls of ``load``."""
        self._load, self._body = load, _prompt(load.prompt)
        self._sent, self._left, self._wrong = 0, load.calls, 0
        self._done = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        for number in range(load.in_flight):
            self._send()
            if number % HANDFUL == 0:
                await asyncio.sleep(0)
        await self._done
        return Done(time.monotonic() - began, self._wrong)

    def _send(self) -> None:
        if self._sent == self._load.calls:
            return
        sessions = self._load.sessions
        name = f"{self._sent % sessions if sessions else self._number}-of-{sessions}"
        self._sent += 1
        self._waiting.add(self._call("engine", name))

    def _call(self, pool: str, session: str) -> bytes:
        self._number += 1
        number = self.link.nonce + self._number.to_bytes(8, "big")
        call = Call(number, 1, pool, "generate", session, -1, "", self.link.incarnation)
        self.link.send(call, self._body)
        return number

    def _answered(self, reply: Reply, body: Frames) -> None:
        self._wrong += reply.call not in self._waiting or sum(map(len, body)) < ANSWER * 8
        self._waiting.discard(reply.call)
        self._left -= 1
        self._send()
        if not self._left:
            self._done.set_result(None)

    async def pile(self, pile: Pile, calls: Calls) -> Done:
        """The calls of ``pile``, until the broker has them all, of this one and those before."""
        self._body = _prompt(pile.prompt)
        self._piled += pile.calls
        began = time.monotonic()
        for number in range(pile.calls):
            self._call(NOBODY, f"waiting-{self._number}")
            if number % HANDFUL == 0:
                await asyncio.sleep(0)
        while (await calls.call(BROKER, "status"))["pending"] < self._piled:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.05)
        return Done(time.monotonic() - began)


def _prompt(tokens: int) -> Frames:
    return encode_body([np.arange(tokens, dtype=np.int32), {"max_new_tokens": ANSWER}, None, None])
