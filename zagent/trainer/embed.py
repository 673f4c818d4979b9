"""The launcher as a subprocess of the trainer: started, heard, ended.

It is a process of its own so that the trainer's script is never imported again in children, and it watches this
process, so a trainer that is killed takes the cluster with it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import zagent
from zagent.config import Config
from zagent.errors import ConfigError, ConnectionLost, StartupError, from_wire

#: The launcher keeps `launcher.start_timeout_s` itself and says what was late; ours only catches a launcher that hangs.
START_MARGIN_S = 30.0
#: Four rooms stop one after another, each within `launcher.stop_timeout_s` and 2 s for SIGKILL; then the last sweep.
STOP_MARGIN_S = 14.0
#: Rooms whose children are given `launcher.stop_timeout_s` one after another.
STOP_STAGES = 4
KILL_S = 5.0
#: A launcher that hangs up has ended milliseconds later.
HANG_UP_S = 1.0
TAIL_LINES = 40


class Launched:
    """A launcher whose engines serve: ``endpoint`` to connect to, ``run_id``, ``run_dir``, ``log_dir``, ``pid``.
    ``started`` is done once its workers do, too, or tells why that will not be."""

    def __init__(
        self, process: _Launcher, facts: Mapping[str, str], stop_timeout_s: float, start_by: float = math.inf
    ) -> None:
        self.endpoint, self.run_id = facts["endpoint"], facts["run_id"]
        self.run_dir, self.log_dir = Path(facts["run_dir"]), Path(facts["log_dir"])
        self.pid = process.pid
        self._process = process
        self._stop_s = STOP_STAGES * stop_timeout_s + STOP_MARGIN_S
        self._start_by = start_by  #: of the monotonic clock
        self._owner = os.getpid()
        self._closed = False
        self._reason: Exception | None = None
        self.started: Future[None] = Future()
        self.started.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._listener = threading.Thread(target=self._listen, name="zagent-launcher", daemon=True)
        self._listener.start()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process.alive

    def exit_reason(self) -> Exception | None:
        """Why it ended by itself, as the launcher's own error; None while it runs or after `close`."""
        if self.alive or self._closed:
            return None
        self._listener.join(KILL_S)
        return self._reason

    def _listen(self) -> None:
        """To what the launcher says until it hangs up."""
        reason: Exception | None = None
        while (event := self._process.next_event(self._patience())) or not self._has_ended():
            if event is None:
                self._settle(StartupError(self._process.unheard()))
            elif event["event"] == "failed":
                reason = from_wire(event["error"])
            else:
                self._settle(None)
        self._process.wait(KILL_S)  # whoever hears of the end finds nothing left
        self._reason = reason or self._process.last_words(self.log_dir / "launcher.log")
        self._settle(self._reason)

    def _patience(self) -> float:
        """Seconds in which it must say something; it has nothing to say once it has started."""
        return math.inf if self.started.done() else max(0.0, self._start_by - time.monotonic())

    def _has_ended(self) -> bool:
        """Whether silence means that; else it has been silent for too long while it started."""
        return self.started.done() or self._process.wait(HANG_UP_S)

    def _settle(self, error: Exception | None) -> None:
        """It has started, or will not: whoever says so first is right."""
        with suppress(InvalidStateError):
            if error is None:
                self.started.set_result(None)
            else:
                self.started.set_exception(error)

    def close(self) -> None:
        """End the cluster: SIGTERM, a bounded wait, SIGKILL. Does nothing the second time, and in a forked child."""
        if self._closed or os.getpid() != self._owner:  # a data loader's fork leaves by atexit, too
            return
        self._closed = True
        atexit.unregister(self.close)
        self._settle(ConnectionLost("the cluster was closed while it started"))
        self._process.end(self._stop_s, self._listener)


def start_launcher(config: Config, command: Sequence[str] | None = None) -> Launched:
    """Start a cluster and wait until its engines and services can be called. ``command`` replaces
    ``python -m zagent.launch --embedded``.

    Raises:
        ConfigError, UnknownAgent: ``config`` cannot be used on this machine.
        StartupError: a process did not become ready, the launcher died, or nothing was heard in time.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"a zagent.Config is needed (Config.load, Config.from_dict), got {type(config).__name__}")
    limit = config.launcher.start_timeout_s + START_MARGIN_S
    start_by = time.monotonic() + limit
    process = _Launcher(config, command or [sys.executable, "-m", "zagent.launch", "--embedded"])
    try:
        facts = process.next_event(limit)
        if facts is None:
            raise StartupError(process.unheard())
        if facts["event"] == "failed":
            raise from_wire(facts["error"])
        return Launched(process, facts, config.launcher.stop_timeout_s, start_by)
    except BaseException:  # Ctrl-C while it starts, too
        process.end(STOP_STAGES * config.launcher.stop_timeout_s + STOP_MARGIN_S)
        raise


class _Launcher:
    """The subprocess and the lines it says."""

    def __init__(self, config: Config, command: Sequence[str]) -> None:
        self._said = b""
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until it has a log file; closed by `end`
        with tempfile.TemporaryFile() as request:  # a pipe could fill up, and block us
            request.write(json.dumps(_request(config)).encode())
            request.seek(0)
            self._popen = subprocess.Popen(
                command,
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the trainer only; it decides
            )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def next_event(self, timeout: float) -> dict[str, Any] | None:
        """The next line; None when it hung up or ``timeout`` seconds (inf: never) are over."""
        assert self._popen.stdout is not None
        deadline = time.monotonic() + timeout
        line = self._popen.stdout.fileno()
        poll = select.poll()
        poll.register(line, select.POLLIN)
        while b"\n" not in self._said:
            left = max(0.0, deadline - time.monotonic())
            ready = poll.poll(None if left == math.inf else left * 1000)
            piece = os.read(line, 1 << 16) if ready else b""
            if not piece:
                return None
            self._said += piece
        first, _, self._said = self._said.partition(b"\n")
        event: dict[str, Any] = json.loads(first)
        return event

    def unheard(self) -> str:
        """What to say about a launcher that said nothing."""
        if self.wait(HANG_UP_S):
            what = f"the launcher (pid {self.pid}) {_ended(self._popen.returncode)} without a word"
        else:
            what = f"the launcher (pid {self.pid}) said nothing in time"
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return "\n".join([what, *text.splitlines()[-TAIL_LINES:]])

    def last_words(self, log: Path) -> Exception:
        """What to say about one that ended without giving a reason."""
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
        what = f"the launcher (pid {self.pid}) {_ended(self._popen.returncode)}; last lines of {log}:"
        return ConnectionLost("\n".join([what, *lines]))

    def end(self, timeout: float, listener: threading.Thread | None = None) -> None:
        """SIGTERM, wait for at most ``timeout`` seconds, SIGKILL; its children die with it. ``listener`` reads what it
        says."""
        with self._lock:
            if self._popen.poll() is None:
                self._popen.terminate()
                if not self.wait(timeout):
                    self._popen.kill()
                    self._popen.wait(KILL_S)
            if listener is not None:
                listener.join(KILL_S)  # what it says has ended: nobody else has the other end
            if self._popen.stdout is not None:
                self._popen.stdout.close()
            self._errors.close()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def _request(config: Config) -> dict[str, Any]:
    """What the launcher reads; with our module path, since loops may lie beside the trainer's script."""
    return {"config": config.to_dict(), "trainer_pid": os.getpid(), "sys_path": [os.path.abspath(p) for p in sys.path]}


def _environment() -> dict[str, str]:
    """Ours, with a new run id from the first moment, and with zagent importable."""
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    made = {**os.environ, "ZAGENT_RUN_ID": run_id}
    root = Path(zagent.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # those are on every path, but not before the library
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), made.get("PYTHONPATH", "")]))
    return made


def _ended(code: int | None) -> str:
    if code is None:
        return "hung up"
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"
