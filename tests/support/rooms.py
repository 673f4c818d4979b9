"""Tiny rooms for the launcher's tests: the contract of a process room and nothing in it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zagent import alive
from zagent.errors import ConfigError

Ready = Callable[[Mapping[str, Any]], None]


def _arm() -> threading.Event:
    """Set by SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    return ended


def _serve(ended: threading.Event) -> None:
    while not ended.wait(0.05):
        pass


def obedient(settings: Mapping[str, Any], ready: Ready) -> None:
    """Serves, writes its name to the file `stops` when it is told to stop."""
    ended = _arm()
    print("serving", flush=True)
    ready({"endpoint": settings.get("endpoint", ""), "tokenizer_probe": settings.get("probe", "")})
    _serve(ended)
    if "stops" in settings:
        with open(settings["stops"], "a") as file:
            file.write(os.environ["ZAGENT_CHILD"] + "\n")


def crashing(settings: Mapping[str, Any], ready: Ready) -> None:
    print("about to fail", flush=True)
    raise ValueError("the model is made of cheese")


def exiting(settings: Mapping[str, Any], ready: Ready) -> None:
    print("last words", flush=True)
    os._exit(7)


def returning(settings: Mapping[str, Any], ready: Ready) -> None:
    """Leaves without having become ready."""


def hanging(settings: Mapping[str, Any], ready: Ready) -> None:
    print("loading for ever", flush=True)
    time.sleep(3600)


def deaf(settings: Mapping[str, Any], ready: Ready) -> None:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready({"endpoint": settings.get("endpoint", "")})
    time.sleep(3600)


def blocked(settings: Mapping[str, Any], ready: Ready) -> None:
    """Becomes ready, and does one thing for ever; with `deaf` SIGABRT does not end it."""
    if settings.get("deaf"):
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
    with alive.busy("a tool"):
        alive.mark()
        ready({})
        time.sleep(3600)


def mute(settings: Mapping[str, Any], ready: Ready) -> None:
    """Serves, but closes what it has open, as code that makes a daemon of itself does."""
    ended = _arm()
    ready({})
    os.closerange(3, 1024)
    _serve(ended)


def dying(settings: Mapping[str, Any], ready: Ready) -> None:
    """Becomes ready; exits with code 3 once the file `cue` is there."""
    ready({"endpoint": settings.get("endpoint", "")})
    print("a cough", flush=True)
    while not Path(settings["cue"]).exists():
        time.sleep(0.02)
    os._exit(3)


def fruitful(settings: Mapping[str, Any], ready: Ready) -> None:
    """Starts a child without our environment, a double-forked one in a session of its own, and a forked one; writes
    their pids to `pids`."""
    sleeper = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"]
    child = subprocess.Popen(sleeper, env={})
    quiet = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    double = f"import subprocess, sys; print(subprocess.Popen(sys.argv[1:], {quiet}).pid)"
    stray = subprocess.run([sys.executable, "-S", "-c", double, *sleeper], capture_output=True, check=True)
    forked = os.fork()
    if forked == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    with open(settings["pids"], "a") as file:
        file.write(f"{child.pid} {int(stray.stdout)} {forked}\n")
    obedient(settings, ready)


def telling(settings: Mapping[str, Any], ready: Ready) -> None:
    """Reports about itself."""
    ended = _arm()
    ready(
        {
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "run_id": os.environ.get("ZAGENT_RUN_ID"),
            "collected": gc.get_threshold(),
            "own_session": os.getsid(0) == os.getpid(),
            "name": Path("/proc/self/comm").read_text().strip(),
            "heavy": sorted({"torch", "transformers", "sglang", "numpy", "pydantic"} & set(sys.modules)),
            "at_exec": sorted(
                entry for entry in Path("/proc/self/environ").read_text().split("\0") if entry.startswith("CUDA_VIS")
            ),
        }
    )
    _serve(ended)


def placed(settings: Mapping[str, Any], ready: Ready) -> None:
    """Reports where it runs, and what it finds there."""
    ended = _arm()
    programs = os.environ["PATH"].split(os.pathsep)[0]
    ready({"executable": sys.executable, "prefix": sys.prefix, "path": sys.path, "programs": programs})
    _serve(ended)


def leaking(settings: Mapping[str, Any], ready: Ready) -> None:
    """Makes a semaphore that it will not remove; reports its name, and the children that this took."""
    ended = _arm()
    semaphore: Any = multiprocessing.get_context("spawn").Semaphore()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ready({"semaphore": semaphore._semlock.name, "children": children})
    _serve(ended)


def overstaying(settings: Mapping[str, Any], ready: Ready) -> None:
    """Returns while a thread of its own would keep the interpreter alive."""
    ready({})
    threading.Thread(target=time.sleep, args=(3600,)).start()
    raise RuntimeError("engine broken")


def endpointed(settings: Mapping[str, Any], ready: Ready) -> None:
    """A broker by looks: makes the file its ipc endpoint names, which the run directory's end must remove."""
    Path(settings["endpoint"].removeprefix("ipc://")).touch()
    obedient(settings, ready)


def straying(settings: Mapping[str, Any], ready: Ready) -> None:
    """`fruitful` as an engine of a planned run: pids go to the run directory."""
    run_dir = Path(settings["endpoint"].removeprefix("ipc://")).parent
    fruitful({**settings, "pids": str(run_dir / "pids")}, ready)


def restarting(settings: Mapping[str, Any], ready: Ready) -> None:
    """`mortal` as an engine of a planned run, whose next life hangs at the start: the cue comes to the run directory,
    and lives are told there."""
    run_dir = Path(settings["endpoint"].removeprefix("ipc://")).parent
    files = {"lives": str(run_dir / "lives"), "cue": str(run_dir / "cue")}
    mortal({**settings, **files, "deaths": 1, "then": "hang"}, ready)


def forking(settings: Mapping[str, Any], ready: Ready) -> None:
    """An engine of a planned run with a fork in a session of its own, deaf to SIGTERM; its pid goes to the run
    directory."""
    forked = os.fork()
    if forked == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    with (Path(settings["endpoint"].removeprefix("ipc://")).parent / "pids").open("a") as file:
        file.write(f"{forked}\n")
    obedient(settings, ready)


def dying_by_cue(settings: Mapping[str, Any], ready: Ready) -> None:
    """`dying` as an engine of a planned run: the cue comes to the run directory."""
    run_dir = Path(settings["endpoint"].removeprefix("ipc://")).parent
    dying({**settings, "cue": str(run_dir / "cue")}, ready)


def refusing(settings: Mapping[str, Any], ready: Ready) -> None:
    print("about to refuse", flush=True)
    raise ConfigError("no cheese here")


def mortal(settings: Mapping[str, Any], ready: Ready) -> None:
    """Any room by looks: notes its life (number, pid) in the file `lives`, and its settings in `orders`; the first
    `deaths` lives exit with code 3 once they were ready and the file `cue` (if any) is there. `then` is what the later
    ones do instead: `hang` or `refuse` at the start. `bound` is the endpoint that it reports."""
    life = _life(settings)
    for name, line in (("lives", f"{life} {os.getpid()}"), ("orders", json.dumps(dict(settings)))):
        if name in settings:
            with open(settings[name], "a") as file:
                file.write(line + "\n")
    if life > settings["deaths"]:
        {"": obedient, "hang": hanging, "refuse": refusing}[settings.get("then", "")](settings, ready)
        return
    print("a cough", flush=True)
    ready({"endpoint": settings.get("bound", "")})
    while "cue" in settings and not Path(settings["cue"]).exists():
        time.sleep(0.02)
    os._exit(3)


def _life(settings: Mapping[str, Any]) -> int:
    """Its number, in whichever form the room is told it."""
    if "members" in settings:
        return int(settings["members"][0]["epoch"])
    return int(settings.get("epoch") or settings["incarnation"])


def mourning(settings: Mapping[str, Any], ready: Ready) -> None:
    """Becomes ready once the process that is noted first in the file `lives` is gone."""
    lives = Path(settings["lives"])
    while not lives.exists() or not lives.read_text():
        time.sleep(0.02)
    pid = lives.read_text().split()[1]
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)
    obedient(settings, ready)


def awaiting(settings: Mapping[str, Any], ready: Ready) -> None:
    """Becomes ready once a second life is noted in the file `lives`."""
    lives = Path(settings["lives"])
    while not lives.exists() or len(lives.read_text().splitlines()) < 2:
        time.sleep(0.02)
    obedient(settings, ready)
