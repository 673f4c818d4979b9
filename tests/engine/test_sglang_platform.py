"""When SGLang runs on our CPU platform, and when the platform steps aside."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from zagent.engine import cpu_platform as platform


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any accelerator, and without variables that choose one."""
    for name in (
        "SGLANG_PLATFORM",
        "SGLANG_USE_CPU_ENGINE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "_nvml_count", lambda: None)
    monkeypatch.setattr(platform.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(platform, "_has_amd", lambda: False)
    monkeypatch.setattr(platform, "_torch_knows_one", lambda: False)
    return monkeypatch


def test_platform_serves_a_machine_without_gpu(bare: pytest.MonkeyPatch) -> None:
    """Without an accelerator the entry point names our platform class."""
    assert platform.activate() == "zagent.engine.cpu_platform:CpuPlatform"


def test_entry_point_is_registered() -> None:
    """SGLang finds `activate` under its group, by the name that SGLANG_PLATFORM would say."""
    (found,) = entry_points(group="sglang.srt.platforms", name=platform.PLATFORM_NAME)
    assert found.value == "zagent.engine.cpu_platform:activate"


def test_steps_aside_for_nvml_devices(bare: pytest.MonkeyPatch) -> None:
    """One GPU according to NVML is enough."""
    bare.setattr(platform, "_nvml_count", lambda: 1)
    assert platform.activate() is None


def test_steps_aside_for_device_files(bare: pytest.MonkeyPatch) -> None:
    """Where NVML does not work, the device files count."""
    bare.setattr(platform.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    assert platform.activate() is None


def test_driver_without_devices_is_no_gpu(bare: pytest.MonkeyPatch) -> None:
    """NVML's zero is believed over left-over device files."""
    bare.setattr(platform, "_nvml_count", lambda: 0)
    bare.setattr(platform.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    assert platform.activate() is not None


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_do_not_count(bare: pytest.MonkeyPatch, hidden: str) -> None:
    """A user who hides all GPUs wants the CPU."""
    bare.setattr(platform, "_nvml_count", lambda: 8)
    bare.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert platform.activate() is not None


def test_steps_aside_for_ascend(bare: pytest.MonkeyPatch) -> None:
    """SGLang's NPU platform goes first."""
    bare.setattr(platform.glob, "glob", lambda pattern: ["/dev/davinci0"] if "davinci" in pattern else [])
    assert platform.activate() is None


@pytest.mark.parametrize(("simd", "expected"), [(0, False), (304, True)])
def test_amd_gpus_are_told_from_cpus(bare: pytest.MonkeyPatch, tmp_path: Path, simd: int, expected: bool) -> None:
    """The kernel's topology lists CPUs too; a node with SIMD units is a GPU."""
    bare.undo()
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        bare.delenv(name, raising=False)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simd}\n")
    assert platform._has_amd(str(tmp_path)) is expected


def test_steps_aside_for_what_only_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Intel XPU that the loaded torch reports counts; without torch nothing is loaded to find out."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(xpu=SimpleNamespace(is_available=lambda: True)))
    assert platform._torch_knows_one()
    monkeypatch.delitem(sys.modules, "torch")
    assert not platform._torch_knows_one()


def test_another_platform_that_the_user_names_goes_first(bare: pytest.MonkeyPatch) -> None:
    """SGLANG_PLATFORM decides."""
    bare.setenv("SGLANG_PLATFORM", "theirs")
    assert platform.activate() is None


def test_user_may_insist_on_the_cpu(bare: pytest.MonkeyPatch) -> None:
    """Naming our platform uses it beside a GPU."""
    bare.setattr(platform, "_nvml_count", lambda: 1)
    bare.setenv("SGLANG_PLATFORM", "zagent_cpu")
    assert platform.activate() is not None


def test_sglangs_own_cpu_platform_goes_first(bare: pytest.MonkeyPatch) -> None:
    """SGLANG_USE_CPU_ENGINE=1 asks for SGLang's."""
    bare.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_module_is_light() -> None:
    """Loading the plugin, as every process with SGLang does, loads neither torch nor sglang."""
    code = (
        "import sys, zagent.engine.cpu_platform as platform; platform.activate();"
        "print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
