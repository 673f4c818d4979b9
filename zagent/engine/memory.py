"""Which of an engine's memory is released, and what may follow what. Pure.

SGLang does not check the order: releasing while calls run, or restoring what was not released, ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zagent.errors import StateError
from zagent.types import MEMORY_TAGS, MemoryTag


class Memory:
    """One engine's.

    Args:
        mode: `engine.mode`.
        keeps_weights: released weights come back as they were (SGLang's `enable_weights_cpu_backup`).
    """

    def __init__(self, mode: str, *, keeps_weights: bool = False) -> None:
        self._mode, self._keeps_weights = mode, keeps_weights
        self.released: set[MemoryTag] = set()
        self._lost = False  #: the weights are garbage

    def sleep(self, level: int | None, in_flight: int) -> list[MemoryTag]:
        """What is to be released: KV at level 1, and the weights as well at level 2; None is the most that the mode
        allows, which is KV for engines with GPUs of their own. Raises `StateError`."""
        most = 2 if self._mode == "hybrid" else 1
        level = most if level is None else level
        if level not in (1, 2):
            raise StateError(f"sleep has levels 1 (KV) and 2 (KV and weights), not {level!r}")
        if self.released:
            raise StateError(f"the engine sleeps already: {_names(self.released)} released")
        if in_flight:
            raise StateError(f"{in_flight} calls run: wait for them, or abort_all_requests(), before sleep()")
        tags: list[MemoryTag] = ["weights", "kv_cache"] if min(level, most) == 2 else ["kv_cache"]
        self.released = set(tags)
        self._lost = self._lost or ("weights" in tags and not self._keeps_weights)
        return tags

    def wake_up(self, tags: Sequence[str] | None) -> list[MemoryTag]:
        """What is to be restored, in order; None = all that is released. What is not released needs nothing: an engine
        may have started while others slept. Raises `StateError`."""
        asked = self.released if tags is None else set(tags)
        for tag in asked:
            if tag not in MEMORY_TAGS:
                raise StateError(f"there is no memory called {tag!r}, only {', '.join(MEMORY_TAGS)}")
        if "weights" in self.released - asked:
            raise StateError("weights come before kv_cache: wake_up(['weights']), update_weights(…), wake_up()")
        restored = [tag for tag in MEMORY_TAGS if tag in asked & self.released]
        self.released = self.released.difference(restored)
        return restored

    def not_restored(self, tags: Sequence[MemoryTag]) -> None:
        """After `wake_up`: it failed."""
        self.released = self.released.union(tags)

    def check_update(self) -> None:
        """New weights need room. Raises `StateError`."""
        if "weights" in self.released:
            raise StateError("the weights are released: wake_up(['weights']) comes before update_weights(…)")

    def updated(self) -> None:
        """New weights are there."""
        self._lost = False

    @property
    def lacks(self) -> list[str]:
        """What has to come before anything can be generated: kinds of memory, and `update`, which is new weights."""
        return [*(tag for tag in MEMORY_TAGS if tag in self.released), *(["update"] if self._lost else [])]

    @property
    def missing(self) -> str:
        """Why nothing can be generated; "" if it can."""
        if self.released:
            return f"{_names(self.released)} released: wake_up() comes before"
        return "the weights were released, and are garbage until update_weights(…)" if self._lost else ""


def _names(tags: set[MemoryTag]) -> str:
    return " and ".join(tag for tag in MEMORY_TAGS if tag in tags) + (" is" if len(tags) == 1 else " are")
