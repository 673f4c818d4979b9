"""How many engines, and which devices each of them gets: the policy's first, then those of services. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from launcher.machine import Machine
from zagent.config import Config, EngineConfig
from zagent.errors import ConfigError

#: Memory one SGLang engine takes on a CPU: two processes with torch (1.5 GB each), weights and KV cache.
CPU_ENGINE_BYTES = 5_000_000_000
#: More engines on one CPU share its cores and are slower together than two.
CPU_ENGINES_AUTO = 2
SIM_ENGINES_AUTO = 2


#: The devices of each engine of a pool; an empty tuple = no GPU.
Slots: TypeAlias = "tuple[tuple[str, ...], ...]"


@dataclass(frozen=True, slots=True)
class AllSlots:
    """The ``policy``'s engines', and those of ``services`` that are pools of engines, by name."""

    policy: Slots
    services: Mapping[str, Slots]

    @property
    def ranks(self) -> int:
        """Processes that compute, an engine without a GPU being one."""
        return sum(max(1, len(slot)) for slots in (self.policy, *self.services.values()) for slot in slots)


def all_slots(config: Config, machine: Machine) -> AllSlots:
    """Devices of the policy's engines, then of the services' in the order they are configured. ``auto`` leaves the
    services what they need.

    Raises:
        ConfigError: more than the machine has; names the key, with the numbers.
    """
    others = {name: service.engine for name, service in config.services.items() if service.engine is not None}
    real = [engine for engine in others.values() if engine.kind == "sglang"]
    policy = engine_slots(config.engine, _for_auto(config.engine, machine, real))
    left = _without(machine, config.engine, policy)
    services: dict[str, Slots] = {}
    for name, engine in others.items():
        try:
            services[name] = _service_slots(engine, machine, left)
        except ConfigError as error:
            raise ConfigError(f"services.{name}: {error}") from error
        left = _without(left, engine, services[name])
    return AllSlots(policy, services)


def _for_auto(engine: EngineConfig, machine: Machine, others: list[EngineConfig]) -> Machine:
    """What `auto` counts: ``others`` have their share set aside, but one engine's worth is the policy's anyway."""
    if engine.count != "auto" or not others:
        return machine
    gpus = machine.gpus
    if engine.gpus is None:
        gpus = gpus.without(name for other in others for name in other.gpus or ())
        names = gpus.names or machine.gpus.names
        unnamed = sum(_devices(other) for other in others if other.gpus is None)
        gpus = replace(gpus, names=names[: max(engine.tensor_parallel_size, len(names) - unnamed)])
    set_aside = sum(int(other.count) for other in others) * CPU_ENGINE_BYTES
    return replace(machine, gpus=gpus, memory=max(machine.memory - set_aside, min(machine.memory, CPU_ENGINE_BYTES)))


def _service_slots(engine: EngineConfig, machine: Machine, left: Machine) -> Slots:
    """Devices that are named are the user's choice, also if others use them; else of those that are ``left``."""
    if engine.kind == "sglang" and engine.gpus is None and machine.gpus.names and not left.gpus.names:
        raise ConfigError(f"needs {_devices(engine)} GPUs, none is left beside the other engines")
    return engine_slots(engine, left if engine.gpus is None else replace(left, gpus=machine.gpus))


def _devices(engine: EngineConfig) -> int:
    return int(engine.count) * engine.tensor_parallel_size


def _without(machine: Machine, engine: EngineConfig, slots: Slots) -> Machine:
    """What that pool leaves to others."""
    if engine.kind == "sim":
        return machine
    taken = [name for slot in slots for name in slot]
    memory = machine.memory if taken else machine.memory - len(slots) * CPU_ENGINE_BYTES
    return replace(machine, gpus=machine.gpus.without(taken), memory=memory)


def engine_slots(engine: EngineConfig, machine: Machine) -> Slots:
    """The devices of each engine of one pool. Raises `ConfigError`."""
    if engine.kind == "sim":
        count = SIM_ENGINES_AUTO if engine.count == "auto" else engine.count
        return ((),) * count
    gpus = machine.gpus.chosen(engine.gpus)
    if gpus:
        return _gpu_slots(engine, gpus)
    if engine.gpus is not None:
        raise ConfigError("engine.gpus is empty: name devices, or leave it out")
    return ((),) * _cpu_engines(engine, machine)


def _gpu_slots(engine: EngineConfig, gpus: tuple[str, ...]) -> Slots:
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
