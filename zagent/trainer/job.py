"""The batch job: a file of prompts in, a file of outcomes out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.errors import InputError, ZagentError
from zagent.trainer.outcomes_file import OutcomesFile, outcome_line
from zagent.trainer.progress import Progress, table
from zagent.trainer.prompts_file import Prompt, batch_of, read_prompts, refuse_broken
from zagent.types import Outcome

#: Exit status after Ctrl-C: 128 + SIGINT, as shells have it.
INTERRUPTED = 130


class Manager(Protocol):
    """What a job needs of `AgentLoopManager`."""

    def stream(self, batch: DataProto) -> Iterator[Outcome]: ...

    def status(self) -> Mapping[str, Any]: ...

    def engine_stats(self) -> Mapping[str, Mapping[str, Any]]: ...


Launch = Callable[[Config], AbstractContextManager[Manager]]


def run_job(
    config: Config,
    *,
    prompts: Path,
    out: Path,
    keep_going: bool = False,
    launch: Launch | None = None,
) -> int:
    """Run every prompt of the file `rollout.n` times; returns the exit status.

    0: all rows `ok`. 1: some row is not, or a broken line was skipped. 130: Ctrl-C; what was written stays. Outcomes
    are appended to ``out`` as they come, in order of completion. ``launch`` replaces `AgentLoopManager.launch`.

    Raises:
        InputError: an unreadable or empty prompts file, an output that cannot be written, or, unless ``keep_going``,
            a broken line (file and number). Nothing has been started then, and ``out`` is as it was.
    """
    found, broken = read_prompts(prompts)
    if not keep_going:
        refuse_broken(broken)
    for text in broken:
        print(f"skipped: {text}", file=sys.stderr)
    if not found:
        raise InputError(f"{prompts}: no prompts")
    batch, rows = batch_of(found, config.rollout.n)
    with OutcomesFile(out, prompts=prompts) as file:
        status = _Job(batch, rows, file).run(config, launch or launch_cluster)
    return status or int(bool(broken))


def launch_cluster(config: Config) -> AbstractContextManager[Manager]:
    """`AgentLoopManager.launch`, and all of it: nothing is written before it is known that rows can run."""
    from zagent.trainer.manager import AgentLoopManager  # brings the wire in; a refused prompts file needs none of it

    manager = AgentLoopManager.launch(config)
    try:
        manager.wait_until_started()
    except BaseException:
        manager.close()
        raise
    return manager


class _Job:
    def __init__(self, batch: DataProto, rows: Sequence[Prompt], file: OutcomesFile) -> None:
        self.batch, self.rows, self.file = batch, rows, file
        self.engines: Mapping[str, Mapping[str, Any]] = {}

    def run(self, config: Config, launch: Launch) -> int:
        print(f"{len(self.rows)} rows; starting the engines", file=sys.stderr, flush=True)
        progress: Progress | None = None
        try:
            with launch(config) as manager:
                self.file.begin()
                with Progress(len(self.rows), sys.stderr) as progress:
                    self._collect(manager, progress)
                self.engines = engines_of(manager)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        finally:
            if progress is not None:
                self._report(progress)
        return 0 if progress.tally.statuses["ok"] == len(self.rows) else 1

    def _collect(self, manager: Manager, progress: Progress) -> None:
        stream = manager.stream(self.batch)
        with contextlib.ExitStack() as leaving:
            leaving.callback(getattr(stream, "close", lambda: None))  # cancels the rows that still run
            for outcome in stream:
                row = self.rows[outcome.index]
                self.file.write(outcome_line(outcome, row.raw_prompt, row.passed))
                progress.add(outcome)

    def _report(self, progress: Progress) -> None:
        print(table(progress, self.engines))
        print(f"{self.file.lines} outcomes written to {self.file.path}", flush=True)


def engines_of(manager: Manager) -> Mapping[str, Mapping[str, Any]]:
    """What the broker says of each engine, and what each says of itself."""
    engines: dict[str, Mapping[str, Any]] = {}
    try:
        engines = dict(manager.status()["pools"].get("engine", {}))
        for name, stats in manager.engine_stats().items():
            engines[name] = {**engines.get(name, {}), **stats}
    except ZagentError as error:  # the outcomes are written; a table without its last part is no reason to fail
        print(f"no status of the engines: {type(error).__name__}: {error}", file=sys.stderr)
    return engines
