"""``python -m zagent.launch``: a batch job, a demonstration, or a cluster that serves until Ctrl-C.

Children are spawned from here and import this module again, so nothing heavy is imported at its top.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zagent.errors import CallerError, ZagentError, to_wire

if TYPE_CHECKING:
    from launcher.context import BrokerLink
    from launcher.run import Ready
    from zagent.config import Config

#: Exit statuses: 2 is argparse's own for a command line that cannot be used.
OK, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130

DEMO_OUT = Path("outputs/demo.jsonl")
#: Below overrides of the user's, and not beside a --config file.
DEMO_SETTINGS = (
    *("model.path=tiny", "rollout.agent=tool_agent", "rollout.imports=[zagent.demo.calculator]"),
    *("rollout.prompt_length=512", "rollout.response_length=384", "rollout.temperature=0.7"),
)
RUN_ID_VARIABLE = "ZAGENT_RUN_ID"


def main(arguments: Sequence[str] | None = None, rooms: Mapping[str, str] | None = None) -> int:
    """Run the command line; the exit status. ``rooms`` replaces entry points by room."""
    options = parse(arguments)
    if options.embedded:
        return embedded(rooms)
    is_job = options.demo or options.prompts is not None
    log_to_stderr(logging.WARNING if is_job else logging.INFO)
    try:
        config = load(options)
        return batch(config, options) if is_job else serve(config, rooms)
    except ZagentError as error:
        print(f"zagent: {error}", file=sys.stderr)
        return UNUSABLE if isinstance(error, CallerError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with status 2 and one line where it cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m zagent.launch",
        allow_abbrev=False,
        description="Without --demo or --prompts: serve until Ctrl-C, for trainers that connect to what it prints.",
    )
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--demo", action="store_true", help="a tiny model with a calculator, on whatever this machine has")
    job.add_argument("--prompts", type=Path, metavar="P.jsonl", help="run every prompt of this file")
    job.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="O.jsonl", help=f"where outcomes go (--demo: {DEMO_OUT})")
    parser.add_argument("--keep-going", action="store_true", help="skip broken lines of the prompts file")
    parser.add_argument("--config", type=Path, metavar="F.yaml", help="the configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override the configuration")
    options = parser.parse_intermixed_args(arguments)
    if options.prompts and not options.out:
        parser.error("--prompts needs --out")
    if options.out and not (options.prompts or options.demo):
        parser.error("--out belongs to --prompts or --demo")
    return options


def load(options: argparse.Namespace) -> Config:
    """The configuration the command line names. Raises `ConfigError`."""
    from zagent.config import Config

    demo = DEMO_SETTINGS if options.demo and options.config is None else ()
    return Config.load(options.config, [*demo, *options.overrides])


def batch(config: Config, options: argparse.Namespace) -> int:
    """A batch job or the demonstration; this process is its trainer."""
    out = options.out or DEMO_OUT
    if options.demo and not options.out:
        with contextlib.suppress(OSError):  # the job says that it cannot write there
            out.parent.mkdir(exist_ok=True)
    try:
        if options.demo:
            from zagent.demo.run import run_demo

            return run_demo(config, out)
        from zagent.trainer.job import run_job

        return run_job(config, prompts=options.prompts, out=out, keep_going=options.keep_going)
    except OSError as error:
        if error.filename != str(out):
            raise
        print(f"zagent: outcomes file {out}: {error.strerror}", file=sys.stderr)  # the disk filled up half-way
        return FAILED


def serve(config: Config, rooms: Mapping[str, str] | None = None) -> int:
    """A cluster until Ctrl-C."""
    from launcher import logs

    def show(ready: Ready) -> None:
        print(f"zagent serves at {ready.endpoint} (Ctrl-C ends it; logs in {ready.log_dir})", flush=True)

    supervise(config, logs.new_run_id(), show, rooms=rooms)
    return OK


def supervise(config: Config, run_id: str, on_ready: Callable[[Ready], None], **rest: Any) -> None:
    """Launch and serve, see `launcher.run.run`."""
    from launcher.run import Options, run

    run(config, Options(run_id=run_id, on_ready=on_ready, link=_link, **rest))


def _link(endpoint: str, secret: str) -> BrokerLink:
    from zagent.client.launcher_link import LauncherLink  # brings zmq and numpy in: once everybody else has started

    return LauncherLink(endpoint, secret)


def embedded(rooms: Mapping[str, str] | None = None) -> int:
    """Serve the trainer that started us: a JSON request on standard input, JSON lines back on standard output."""
    report = Report()
    try:
        _serve_trainer(json.load(sys.stdin), report, rooms)
    except Exception as error:
        logging.getLogger(__name__).exception("the run ends with an error")
        is_callers = isinstance(error, CallerError)  # says what to change; where we found out helps nobody
        report.send({"event": "failed", "error": to_wire(error.with_traceback(None) if is_callers else error)})
        return UNUSABLE if isinstance(error, CallerError) else FAILED
    return OK


def _serve_trainer(request: Mapping[str, Any], report: Report, rooms: Mapping[str, str] | None) -> None:
    from launcher.quick import quick_imports

    with quick_imports():
        from launcher.cluster import open_trainer
        from zagent.config import Config

    sys.path.extend(entry for entry in request.get("sys_path", ()) if entry not in sys.path)
    config = Config.from_dict(request["config"])
    trainer = open_trainer(int(request["trainer_pid"]))
    if trainer is None:  # died before we looked
        return

    def announce(serving: Ready) -> None:
        facts = {name: getattr(serving, name) for name in ("endpoint", "run_id", "run_dir", "log_dir")}
        report.send({"event": "serving", **facts})

    def complete(_ready: Ready) -> None:
        report.send({"event": "ready"})

    run_id = os.environ[RUN_ID_VARIABLE]
    supervise(config, run_id, complete, on_serving=announce, on_log_dir=_log_there, trainer=trainer, rooms=rooms)


class Report:
    """Lines to the trainer over what was our standard output; stray prints go to standard error from now on."""

    def __init__(self) -> None:
        self._line = os.fdopen(os.dup(1), "w")  # not inherited by children
        os.dup2(2, 1)

    def send(self, event: Mapping[str, Any]) -> None:
        """One line; nothing if the trainer is gone."""
        try:
            self._line.write(json.dumps(event) + "\n")
            self._line.flush()
        except BrokenPipeError:
            logging.getLogger(__name__).warning("the trainer is gone, unsaid: %s", event)


def _log_there(directory: Path) -> None:
    """Log, and let everything this process writes go, to `launcher.log` in ``directory``."""
    file = os.open(directory / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(file, target)
    os.close(file)
    log_to_stderr(logging.INFO)


def log_to_stderr(level: int) -> None:
    """Timed lines."""
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
