"""What a machine offers, read from files and nvidia-smi's text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import machine
from launcher.gpus import Gpus
from launcher.ports import DERIVED, Reservation
from zagent.errors import ConfigError

UUIDS = {"0": "GPU-aaa1", "1": "GPU-aaa2", "2": "GPU-bbb3"}


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def memory_root(tmp_path: Path, groups: str) -> Path:
    put(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:   8000 kB\n", proc__self__cgroup=groups)
    return tmp_path


def test_memory_without_groups_is_mem_available(tmp_path: Path) -> None:
    """No limit anywhere: what /proc/meminfo calls available."""
    assert machine.available_memory(memory_root(tmp_path, "")) == 8000 * 1024


def test_memory_of_a_version_2_group_is_limit_minus_use(tmp_path: Path) -> None:
    """Page cache that can be dropped does not count as used."""
    root = memory_root(tmp_path, "0::/a/b\n")
    group = root / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000\n")
    (group / "memory.current").write_text("3000\n")
    (group / "memory.stat").write_text("anon 1000\ninactive_file 2000\n")
    assert machine.available_memory(root) == 4000


def test_memory_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    """The tightest limit on the way up decides; `max` is none."""
    root = memory_root(tmp_path, "0::/a/b\n")
    group = root / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("10\n")
    (group.parent / "memory.max").write_text("700\n")
    (group.parent / "memory.current").write_text("100\n")
    assert machine.available_memory(root) == 600


def test_memory_of_a_version_1_group(tmp_path: Path) -> None:
    """The older layout has a tree per controller and other names."""
    root = memory_root(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job\n")
    group = root / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("900\n")
    (group / "memory.usage_in_bytes").write_text("1000\n")
    assert machine.available_memory(root) == 0


def test_cpu_quota_limits_the_cores(tmp_path: Path) -> None:
    """A quota of 1 CPU leaves one core, however many the affinity mask has; none leaves the mask."""
    put(tmp_path, proc__self__cgroup="0::/\n")
    everything = len(os.sched_getaffinity(0))
    assert machine.cores(tmp_path) == everything
    put(tmp_path, **{"sys__fs__cgroup__cpu.max": "max 100000\n"})
    assert machine.cores(tmp_path) == everything
    put(tmp_path, **{"sys__fs__cgroup__cpu.max": "100000 100000\n"})
    assert machine.cores(tmp_path) == 1


def test_this_machine_has_cores_and_memory() -> None:
    """The real files can be read."""
    found = machine.inspect({})
    assert found.cores >= 1
    assert found.memory > 0


def test_nvidia_smi_lines_are_read() -> None:
    """Index and UUID; anything else is no GPU."""
    assert machine.parse_gpus("0, GPU-aaa1\n1, GPU-aaa2\n") == {"0": "GPU-aaa1", "1": "GPU-aaa2"}
    assert machine.parse_gpus("No devices were found\n") == {}


def test_failing_nvidia_smi_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool without a driver is a machine without GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.installed_gpus() == {}


def test_nvidia_smi_is_asked_for_index_and_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints is what we have."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=index,uuid ] && echo "0, GPU-x"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.installed_gpus() == {"0": "GPU-x"}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("GPU-bbb,1", ("GPU-bbb", "1")),
        ("1,9,0", ("1",)),  # CUDA stops at the first that is no device
        ("GPU-aaa", ()),  # ambiguous
        ("MIG-x,MIG-y", ("MIG-x", "MIG-y")),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(listed: str | None, names: tuple[str, ...]) -> None:
    """Order, UUID prefixes and the stop at the first invalid name."""
    assert Gpus.visible(listed, UUIDS).names == names


def test_nothing_is_visible_where_nothing_is_installed() -> None:
    """CUDA_VISIBLE_DEVICES alone makes no GPU."""
    assert Gpus.visible("0,1", {}).names == ()


def test_a_uuid_of_a_visible_index_may_be_chosen() -> None:
    """Visible as 1, wanted by its UUID: the user's name is kept."""
    assert Gpus.visible("1,2", UUIDS).chosen(["GPU-aaa2"]) == ("GPU-aaa2",)


def test_a_device_named_twice_is_refused() -> None:
    """Index and UUID of one device are one device."""
    with pytest.raises(ConfigError, match=r"same device twice: '1' and 'GPU-aaa2'"):
        Gpus.visible(None, UUIDS).chosen(["1", "GPU-aaa2"])


def test_sixteen_engines_get_distinct_ports() -> None:
    """No port is given twice, derived ones included."""
    reservation = Reservation()
    try:
        given = [reservation.take() for _ in range(16)]
    finally:
        reservation.close()
    numbers = [n for p in given for n in (p.nccl_port, p.port, *(p.port + step for step in DERIVED))]
    assert len(set(numbers)) == len(numbers)


def test_two_reservations_with_the_same_dice_do_not_collide() -> None:
    """What one run holds, another does not get: ports are bound, not only looked at."""
    first, second = Reservation(seed=1), Reservation(seed=1)
    try:
        assert first.take() != second.take()
    finally:
        first.close()
        second.close()


def test_released_ports_can_be_bound() -> None:
    """After release the engine can have them; the reservation never gives them again."""
    import socket

    reservation = Reservation(seed=2)
    try:
        ports = reservation.take()
        reservation.release(ports)
        with socket.socket() as engine:
            engine.bind(("", ports.nccl_port))
    finally:
        reservation.close()
