"""SGLang on a machine without a GPU: an out-of-tree SGLang platform.

SGLang 0.5.23's own CPU path needs a build of sgl-kernel that no package index carries. An out-of-tree platform with
`torch_native` attention and native operators runs the whole of SGLang without it. SGLang finds `activate` through the
entry-point group `sglang.srt.platforms` and loads this module in every process that uses SGLang, zagent or not: it
imports nothing heavy, and steps aside wherever SGLang has something better to run on.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import re
import sys
from pathlib import Path
from typing import Any

#: Name of our entry point, and what `SGLANG_PLATFORM` must say to insist on it.
PLATFORM_NAME = "zagent_cpu"


def activate() -> str | None:
    """SGLang's entry point: the path of the platform class, or None where SGLang has a device of its own."""
    return f"{__name__}:CpuPlatform" if is_active() else None


def is_active() -> bool:
    """Whether SGLang in this process and its children runs on our CPU platform.

    `SGLANG_PLATFORM` decides if it is set; `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU platform.
    """
    chosen = os.environ.get("SGLANG_PLATFORM")
    if chosen:
        return chosen == PLATFORM_NAME
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1" and not has_accelerator()


def has_accelerator() -> bool:
    """Whether a device that SGLang supports is here and visible. Initialises no driver: forks stay possible."""
    return _has_nvidia() or _has_amd() or bool(glob.glob("/dev/davinci[0-9]*")) or _torch_knows_one()


def _hidden(*variables: str) -> bool:
    """Whether one of these lists of visible devices is set and begins with nothing that exists."""
    return any(os.environ[name].strip() in ("", "-1") for name in variables if name in os.environ)


def _has_nvidia() -> bool:
    if _hidden("CUDA_VISIBLE_DEVICES"):
        return False
    count = _nvml_count()
    return count > 0 if count is not None else bool(glob.glob("/dev/nvidia[0-9]*"))


def _nvml_count() -> int | None:
    """GPUs according to NVML, which does not create a CUDA context; None = no working NVML (as on Jetson boards)."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None
    finally:
        nvml.nvmlShutdown()


def _has_amd(topology: str = "/sys/class/kfd/kfd/topology/nodes") -> bool:
    """The kernel driver lists CPUs beside GPUs; only GPUs have SIMD units."""
    if _hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        return False
    for path in Path(topology).glob("*/properties"):
        try:
            found = re.search(r"^simd_count (\d+)", path.read_text(), re.MULTILINE)
        except OSError:  # a node that this container may not see
            continue
        if found and int(found[1]) > 0:
            return True
    return False


def _torch_knows_one() -> bool:
    """Intel XPU, Moore Threads and the like, which only torch can tell; where SGLang asks us, torch is loaded."""
    torch = sys.modules.get("torch")
    devices = [getattr(torch, name) for name in ("xpu", "musa", "npu") if hasattr(torch, name)]
    return any(device.is_available() for device in devices)


@functools.cache
def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """SGLang's CPU device operations, named out-of-tree so that no sgl-kernel operator is looked for."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

    return CpuPlatform


def __getattr__(name: str) -> Any:
    if name == "CpuPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
