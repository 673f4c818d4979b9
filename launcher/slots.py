"""How many engines, and which devices each of them gets. Pure."""

from __future__ import annotations

from launcher.machine import Machine
from zagent.config import EngineConfig
from zagent.errors import ConfigError

#: Memory one SGLang engine takes on a CPU: two processes with torch (1.5 GB each), weights and KV cache.
CPU_ENGINE_BYTES = 5_000_000_000
#: More engines on one CPU share its cores and are slower together than two.
CPU_ENGINES_AUTO = 2
SIM_ENGINES_AUTO = 2


def engine_slots(engine: EngineConfig, machine: Machine) -> tuple[tuple[str, ...], ...]:
    """The devices of each engine; an empty tuple = no GPU. Raises `ConfigError`."""
    if engine.kind == "sim":
        count = SIM_ENGINES_AUTO if engine.count == "auto" else engine.count
        return ((),) * count
    gpus = machine.gpus.chosen(engine.gpus)
    if gpus:
        return _gpu_slots(engine, gpus)
    if engine.gpus is not None:
        raise ConfigError("engine.gpus is empty: name devices, or leave it out")
    return ((),) * _cpu_engines(engine, machine)


def _gpu_slots(engine: EngineConfig, gpus: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    width = engine.tensor_parallel_size
    count = max(1, len(gpus) // width) if engine.count == "auto" else engine.count
    if count * width > len(gpus):
        raise ConfigError(
            f"engine.count={engine.count} with engine.tensor_parallel_size={width} needs {count * width} GPUs, "
            f"{len(gpus)} can be used ({', '.join(gpus)})"
        )
    return tuple(gpus[i * width : (i + 1) * width] for i in range(count))


def _cpu_engines(engine: EngineConfig, machine: Machine) -> int:
    if engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"engine.tensor_parallel_size={engine.tensor_parallel_size} needs GPUs, none is visible; on a CPU it is 1"
        )
    fit = machine.memory // CPU_ENGINE_BYTES
    count = min(CPU_ENGINES_AUTO, max(1, fit)) if engine.count == "auto" else engine.count
    if count > fit:
        raise ConfigError(
            f"engine.count={engine.count}: {count} engine{'s' if count > 1 else ''} on this CPU need about "
            f"{count * CPU_ENGINE_BYTES / 1e9:.1f} GB of memory, {machine.memory / 1e9:.1f} GB are available"
        )
    return count
