"""All child processes of a run that are not yet forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.child import Child
from launcher.context import Context
from launcher.specs import ChildSpec


class Children:
    """Spawns them, and calls ``on_death`` when one is dead, ``on_exit`` once what it started is gone, too."""

    def __init__(self, context: Context, on_death: Callable[[Child], None], on_exit: Callable[[Child], None]) -> None:
        self._context = context
        self._on_death, self._on_exit = on_death, on_exit
        self._known: list[Child] = []

    def spawn(self, spec: ChildSpec) -> Child:
        """Start ``spec``. Raises `OSError`: no memory, no file descriptors."""
        if spec.ports is not None and self._context.ports is not None:
            self._context.ports.release(spec.ports)
        child = Child(spec, self.log(spec), self._context.run_id)
        self._known.append(child)
        if self._context.directory is not None:
            self._context.directory.note_child(child.pid)
        child.died.add_done_callback(lambda _: self._on_death(child))
        child.exited.add_done_callback(lambda _: self._gone(child))
        return child

    def _gone(self, child: Child) -> None:
        if self._context.directory is not None:
            self._context.directory.note_gone(child.pid)
        self._on_exit(child)

    def log(self, spec: ChildSpec) -> Path:
        """The log file of all its lives."""
        return self._context.log_dir / f"{spec.name}.log"

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._known))

    def forget(self, child: Child) -> None:
        """It has exited, and what follows from it is decided."""
        self._known.remove(child)

    def serving(self) -> list[Child]:
        """Those that are ready and alive."""
        return [child for child in self._known if child.serves]

    def members(self) -> list[list[str | int]]:
        """[pool, name, epoch] of each member that is ready and alive: whom a new broker can expect."""
        return [[m.pool, m.name, m.epoch] for child in self.serving() for m in child.spec.members]

    def of_pool(self, pool: str) -> int:
        """How many processes of that pool live, or are dead but may be started again: nothing is decided yet."""
        return sum(child.spec.pool == pool for child in self._known)
