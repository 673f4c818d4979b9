"""A manager that needs no processes: rows are answered by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.types import Outcome

STATUS = {"pools": {"engine": {"engine-0": {"state": "ready", "total": 2}}, "worker": {}}}


class FakeManager:
    """Answers the rows of a batch with ``answer(row number, batch)``; exceptions are raised in the stream."""

    def __init__(self, answer: Callable[[int, DataProto], Outcome | BaseException], status: Any = STATUS) -> None:
        self.answer, self.given_status = answer, status
        self.launched: Config | None = None
        self.stream_closed = self.closed = False

    def launch(self, config: Config) -> FakeManager:
        self.launched = config
        return self

    def stream(self, batch: DataProto) -> Iterator[Outcome]:
        self.kept = self._stream(batch)  # a second reference: only close() ends it, not the garbage collector
        return self.kept

    def _stream(self, batch: DataProto) -> Iterator[Outcome]:
        try:
            for i in reversed(range(len(batch))):  # completion order is not input order
                outcome = self.answer(i, batch)
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            self.stream_closed = True

    def status(self) -> Any:
        if isinstance(self.given_status, Exception):
            raise self.given_status
        return self.given_status

    def engine_stats(self) -> Any:
        return {"engine-0": {"response_tokens": 7, "prompt_tokens": 4, "cached_tokens": 1}}

    def __enter__(self) -> FakeManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.closed = True
