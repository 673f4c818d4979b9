"""Classes for services in tests."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zagent


class Everything:
    """A bit of each kind of method."""

    limit = 5

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.ended: list[str] = []
        self.running = 0
        self.most = 0

    async def greet(self, name: str, *, mark: str = "!") -> str:
        return f"{self.greeting} {name}{mark}"

    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @staticmethod
    @zagent.idempotent
    def twice(value: Any) -> Any:
        return [value, value]

    @zagent.idempotent
    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    def where(self) -> str:
        return threading.current_thread().name

    async def raises(self, kind: str) -> None:
        errors: dict[str, BaseException] = {
            "value": ValueError("a bad value"),
            "caller": zagent.InvalidRequest("not like this"),
            "foreign": Foreign("from afar"),
            "exit": SystemExit(3),
            "lost": zagent.MemberLost("a call of its own was lost"),
        }
        raise errors[kind]

    def exits(self) -> None:
        sys.exit("bye")

    @zagent.idempotent
    async def passes_on(self) -> None:
        self.running += 1
        raise zagent.MemberLost(f"attempt {self.running}")

    async def spawns_an_exit(self) -> str:
        async def end() -> None:
            sys.exit(4)

        task = asyncio.ensure_future(end())
        await asyncio.wait([task])
        return type(task.exception()).__name__

    async def sleep(self, seconds: float) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            self.running -= 1
        return "slept"

    @zagent.idempotent
    async def nap(self, seconds: float) -> str:
        return await self.sleep(seconds)

    async def numbers(self) -> Any:
        yield 1

    def _private(self) -> None:
        """Not for callers."""

    class Inner:
        """No method."""

    @property
    def broken(self) -> int:
        raise AssertionError("properties are not looked at")


class Foreign(Exception):
    """Known on one side only."""


class Living:
    """Notes its life in a file."""

    def __init__(self, path: str, hang_on_close: bool = False) -> None:
        self._path = Path(path)
        self._hang_on_close = hang_on_close
        self._note("made")

    def _note(self, what: str) -> None:
        with self._path.open("a") as file:
            file.write(what + "\n")

    async def start(self) -> None:
        await asyncio.sleep(0)
        self._note("started")

    async def close(self) -> None:
        self._note("closing")
        if self._hang_on_close:
            await asyncio.sleep(3600)
        self._note("closed")

    def pid(self) -> int:
        return os.getpid()


class Hooks:
    """Synchronous `start` and `close`."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def close(self) -> None:
        self.seen.append("close")
        raise RuntimeError("closing failed")

    def what(self) -> list[str]:
        return self.seen


class Refuses:
    """Its constructor raises."""

    def __init__(self, how: str = "raise") -> None:
        if how == "exit":
            sys.exit("no licence")
        raise ValueError("no such\nlicence: 7")


class Unstartable:
    """Its `start` raises."""

    async def start(self) -> None:
        raise OSError("cannot reach the database")


class NeverReady:
    """Its `start` does not return."""

    async def start(self) -> None:
        await asyncio.sleep(3600)


class Binds:
    """A method that a caller could not reach."""

    def bind(self) -> None:
        """Hidden by `ServicePool.bind`."""


class Front:
    """Calls other services."""

    def __init__(self, services: zagent.Services, name: str = "front") -> None:
        self._services = services
        self.name = name

    async def start(self) -> None:
        self.answer = await self._services["back"].add(20, 1)

    async def ask(self) -> list[Any]:
        return [
            self.answer,
            await self._services["judge"].chat([{"role": "user", "content": "?"}], {"max_new_tokens": 3}),
        ]


class Worker:
    """A process to be killed, and to be told apart."""

    def __init__(self, crash: str = "") -> None:
        if crash and Path(crash).exists():
            print("the cheese is gone", flush=True)
            os._exit(9)

    def pid(self) -> int:
        return os.getpid()

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    async def begin(self, note: str, seconds: float = 0.0) -> int:
        self._note(note)
        await asyncio.sleep(seconds)
        return os.getpid()

    @zagent.idempotent
    async def begin_again(self, note: str, seconds: float = 0.0) -> int:
        return await self.begin(note, seconds)

    def block(self, note: str, seconds: float) -> int:
        """In a thread."""
        self._note(note)
        time.sleep(seconds)
        return os.getpid()

    @staticmethod
    def _note(path: str) -> None:
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")


def a_function() -> None:
    """No class."""
