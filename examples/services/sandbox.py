"""A service that runs Python code a model has written, each time in a process of its own.

    python -m zagent.launch services.sandbox.target=examples.services.sandbox.Sandbox services.sandbox.count=4

From an agent loop, a tool or a reward function: ``await services["sandbox"].run("print(6 * 7)", limit=3)``.

It keeps honest mistakes from doing harm: endless loops, too much memory, endless output, forgotten processes. It is *no
security boundary*: the code runs as your user, sees your files and reaches your network. Code that means harm belongs
into a container or a virtual machine, which a service like this one can start just as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zagent

#: Runs first in the child. Hard limits: the code cannot raise them again.
BOOT = """
import resource, sys
cpu_s, memory, file_bytes = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
del sys.argv[1:], resource, cpu_s, memory, file_bytes
with open("main.py", encoding="utf-8") as source:
    code = compile(source.read(), "main.py", "exec")
exec(code, {"__name__": "__main__"})
"""
#: What the code's processes see of our environment: where programs lie, and the marks by which zagent's launcher finds
#: them should this service be killed.
KEPT = ("PATH", "LANG", "ZAGENT_RUN_ID", "ZAGENT_CHILD")


class Sandbox:
    """Args:
    limit_s: wall-clock and CPU seconds of a run that does not say otherwise.
    memory_mb: address space of each process.
    output_bytes: kept of each of stdout and stderr; also the longest file the code may write.
    """

    def __init__(self, limit_s: float = 10.0, memory_mb: int = 512, output_bytes: int = 65_536) -> None:
        self._limit_s = limit_s
        self._memory = memory_mb * 2**20
        self._output_bytes = output_bytes

    @zagent.idempotent
    async def run(self, code: str, limit: float | None = None) -> dict[str, Any]:
        """Run ``code`` for at most ``limit`` seconds.

        Returns:
            `stdout`, `stderr` (text), `exit_status` (negative: killed by that signal), `timed_out`, `seconds`.
        """
        limit_s = self._limit_s if limit is None else limit
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sandbox-") as place:
            directory = Path(place)
            (directory / "main.py").write_text(code, encoding="utf-8", errors="surrogateescape")
            with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
                status, timed_out = await self._run(directory, limit_s, out, err)
            return {
                "stdout": self._text(directory / "stdout"),
                "stderr": self._text(directory / "stderr"),
                "exit_status": status,
                "timed_out": timed_out,
                "seconds": time.monotonic() - began,
            }

    async def _run(self, directory: Path, limit_s: float, out: Any, err: Any) -> tuple[int, bool]:
        """Exit status, and whether the time was over. No process of the code's group is left."""
        limits = [str(max(1, round(limit_s))), str(self._memory), str(self._output_bytes)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", BOOT, *limits),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=directory,
            env={"HOME": str(directory), **{name: os.environ[name] for name in KEPT if name in os.environ}},
            start_new_session=True,  # a group of its own, to be killed as a whole
        )
        try:
            return await asyncio.wait_for(process.wait(), limit_s), False
        except TimeoutError:
            _kill_group(process.pid)
            return await process.wait(), True
        finally:  # also when the call is cancelled, and for what the code has started and left
            _kill_group(process.pid)
            await process.wait()

    def _text(self, path: Path) -> str:
        with path.open("rb") as file:
            return file.read(self._output_bytes).decode(errors="replace")


def _kill_group(leader: int) -> None:
    """A group's number is not given to others while anybody is in it; afterwards there is nobody to kill."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
