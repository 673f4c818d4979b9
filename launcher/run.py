"""One run from configuration to the last process gone: find out, plan, start, serve, clean up."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher import janitor, logs, machine, processes, rundir, tracker
from launcher.cluster import SIGNALS, Cluster
from launcher.context import Context, LinkFactory
from launcher.interpreter import check_interpreters
from launcher.plan import ROOMS, Facts, Model, check_context, plan
from launcher.ports import Reservation
from launcher.rundir import RunDir
from launcher.slots import all_slots
from launcher.specs import Plan, Run
from zagent.config import Config, ModelConfig
from zagent.errors import ConfigError

logger = logging.getLogger(__name__)

#: Processes that carry the run id get this long to vanish under the last SIGKILL.
LAST_SWEEP_S = 2.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A cluster that serves."""

    endpoint: str
    run_id: str
    run_dir: str
    log_dir: str


@dataclass(frozen=True, slots=True)
class Options:
    """``trainer`` is the pidfd of the process to end with. ``on_log_dir`` is called once the log directory is there,
    ``on_serving`` once its engines and services can be called, ``on_ready`` once all are there. ``rooms`` are entry
    points by room, ``link`` makes the line to the broker."""

    run_id: str
    on_ready: Callable[[Ready], None]
    link: LinkFactory
    on_log_dir: Callable[[Path], None] = lambda _path: None
    on_serving: Callable[[Ready], None] = lambda _ready: None
    trainer: int | None = None
    rooms: Mapping[str, str] | None = None


def run(config: Config, options: Options) -> None:
    """Launch ``config`` and serve until SIGINT, SIGTERM or the trainer's end. Nothing is left when it returns or
    raises, but the log directory. Must run in the main thread.

    Raises:
        ConfigError, UnknownAgent: it cannot run on this machine, or its key file is no good.
        StartupError, ConnectionLost, PoolLost: as `Cluster.run`.
    """
    os.environ[processes.RUN_ID_VARIABLE] = options.run_id
    rundir.sweep()
    found = machine.inspect()
    all_slots(config, found)  # refuse at once what needs no model to be refused
    config = _with_keys(config)
    with _ends_with(options.trainer):
        check_interpreters(config)
        model = _resolve(config.model, config.engine.kind)
        service_models = _resolve_services(config)
    check_context(config, model)
    with ExitStack() as stack:
        log_dir = logs.create(Path(config.logs.dir) if config.logs.dir else None, options.run_id, config.logs.keep)
        options.on_log_dir(log_dir)
        directory = stack.enter_context(_directory(options.run_id))
        ports = stack.enter_context(closing(Reservation()))
        facts = Facts(found, model, _decide(directory), service_models)
        planned = plan(config, facts, ports.take, options.rooms or ROOMS)
        context = Context(
            options.run_id,
            facts.run.secret,
            log_dir,
            config.launcher,
            options.link,
            trainer=options.trainer,
            ports=ports,
            directory=directory,
        )
        asyncio.run(_serve(planned, context, options))


async def _serve(planned: Plan, context: Context, options: Options) -> None:
    def facts(endpoint: str) -> Ready:
        assert context.directory is not None
        return Ready(endpoint, context.run_id, str(context.directory.path), str(context.log_dir))

    await Cluster(planned, context).run(
        lambda endpoint: options.on_ready(facts(endpoint)), lambda endpoint: options.on_serving(facts(endpoint))
    )


def _resolve(model: ModelConfig, kind: str) -> Model:
    from zagent import models  # may bring heavy packages in; a refused configuration needs none of it

    path = models.resolve(model.path)
    facts = models.facts(path)
    models.check_source("path", path)
    if model.tokenizer_path is not None:
        models.check_source("tokenizer_path", model.tokenizer_path)
    if kind == "sglang" and facts is not None and not facts.architectures:
        raise ConfigError(f"model.path={model.path!r}: its config.json names no `architectures`")
    return Model(path, facts.context_length if facts is not None else None)


def _with_keys(config: Config) -> Config:
    if config.broker.keys is None:
        return config
    from launcher import keys  # brings zmq in

    return keys.prepared(config)


def _resolve_services(config: Config) -> dict[str, Model]:
    """The models of services that are pools of engines, by service."""
    found: dict[str, Model] = {}
    for name, service in config.services.items():
        if service.model is not None and service.engine is not None:
            try:
                found[name] = _resolve(service.model, service.engine.kind)
            except ConfigError as error:
                raise ConfigError(f"services.{name}: {error}") from error
    return found


def _decide(directory: RunDir) -> Run:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Run(
        run_id=directory.run_id,
        run_dir=str(directory.path),
        temporary=str(directory.temporary),
        inductor_cache=cache or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"),
        launcher_pid=os.getpid(),
        secret=secrets.token_hex(32),
    )


@contextmanager
def _directory(run_id: str) -> Iterator[RunDir]:
    """The run directory, with a janitor for the case that we are killed; afterwards no process of the run is left."""
    directory = rundir.create(run_id)
    try:
        helper = janitor.start(directory)
        try:
            yield directory
        finally:
            with _undisturbed():
                _end_processes(run_id, helper.pid)
                janitor.end(helper)
    finally:
        rundir.remove(directory)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait: cleaning up is short, and is not to be cut shorter."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_processes(run_id: str, helper: int) -> None:
    """The last sweep: whatever carries the run id."""
    spared = {helper, tracker.pid() or 0}
    left = processes.kill_until_gone(lambda: processes.of_run(run_id, spared), LAST_SWEEP_S)
    if left:
        logger.error("processes of this run do not end: %s", [p.pid for p in left])
    tracker.end()


@contextmanager
def _ends_with(trainer: int | None) -> Iterator[None]:
    """Within, this process ends at once when ``trainer`` (a pidfd) does: nobody waits for the model any more."""
    if trainer is None:
        yield
        return
    done, finish = os.pipe()
    watch = threading.Thread(target=_exit_with, args=(trainer, done), name="trainer-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        os.close(finish)
        watch.join()
        os.close(done)


def _exit_with(trainer: int, done: int) -> None:
    poll = select.poll()
    poll.register(trainer, select.POLLIN)
    poll.register(done)  # POLLHUP
    if trainer in {fd for fd, _ in poll.poll()}:
        logger.warning("the trainer is gone, ending")
        run_id = os.environ[processes.RUN_ID_VARIABLE]
        processes.kill_until_gone(lambda: processes.of_run(run_id), LAST_SWEEP_S)
        os._exit(1)
