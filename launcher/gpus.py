"""GPUs by the names that CUDA_VISIBLE_DEVICES takes: indices, UUIDs, MIG names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zagent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpus:
    """Visible GPUs by ``names``, in CUDA's order; ``uuids`` are those of the installed ones, by index."""

    names: tuple[str, ...] = ()
    uuids: tuple[tuple[str, str], ...] = ()

    @classmethod
    def visible(cls, listed: str | None, installed: Mapping[str, str]) -> Gpus:
        """What CUDA would show with ``listed`` as CUDA_VISIBLE_DEVICES (None = not set) on these GPUs.

        CUDA stops reading at the first name that is no device, and so does this.
        """
        table = tuple(installed.items())
        if not installed:
            return cls()
        if listed is None:
            return cls(tuple(installed), table)
        names: list[str] = []
        for name in (part.strip() for part in listed.split(",")):
            if _identity(name, table) is None or name in names:
                break
            names.append(name)
        return cls(tuple(names), table)

    def chosen(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        """``wanted`` in its order, checked; all that are visible if None.

        Raises:
            ConfigError: a device that is not visible, or is named twice; lists the visible ones.
        """
        if wanted is None:
            return self.names
        seen = {_identity(name, self.uuids): name for name in self.names}
        taken: dict[str, str] = {}
        for name in wanted:
            device = _identity(name, self.uuids)
            if device is None or (device not in seen and not device.startswith("MIG-")):
                raise ConfigError(
                    f"engine.gpus names {name!r}, but the visible GPUs are: {', '.join(self.names) or 'none'}"
                )
            if device in taken:
                raise ConfigError(f"engine.gpus names the same device twice: {taken[device]!r} and {name!r}")
            taken[device] = name
        return tuple(taken.values())

    def without(self, taken: Iterable[str]) -> Gpus:
        """Those that are not ``taken``, however they are called there."""
        gone = {_identity(name, self.uuids) for name in taken}
        return replace(self, names=tuple(name for name in self.names if _identity(name, self.uuids) not in gone))


def _identity(name: str, uuids: Iterable[tuple[str, str]]) -> str | None:
    """The UUID that ``name`` (index, UUID or the beginning of one) stands for. MIG names stand for themselves."""
    if name.startswith("MIG-"):
        return name
    fits = [uuid for index, uuid in uuids if name == index or (name.startswith("GPU-") and uuid.startswith(name))]
    return fits[0] if len(fits) == 1 else None
