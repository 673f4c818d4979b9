"""What the kernel says of processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.resident import Resident, cpu_s, descendants

ROLLUP = """\
55d0c0a00000-7ffd2f5f2000 ---p 00000000 00:00 0                          [rollup]
Rss:               67000 kB
Pss:               41000 kB
Pss_Dirty:         20000 kB
Shared_Clean:      30000 kB
"""
#: Starts a child, says which, and ends it when its own input ends.
PARENT = """\
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_rss_and_pss_are_read_in_bytes():
    """Nothing with a similar name is taken for them."""
    assert Resident.parsed(ROLLUP) == Resident(67000 * 1024, 41000 * 1024)


def test_a_process_holds_no_less_than_its_share():
    """Of this very process."""
    held = Resident.of(os.getpid())
    assert held.rss >= held.pss > 1_000_000


def test_children_and_theirs_are_found_and_the_dead_are_not():
    """A grandchild after its parent; nobody once they have ended."""
    child = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    found = descendants(os.getpid())
    assert found.index(child.pid) < found.index(grandchild)
    child.communicate("")
    assert not {child.pid, grandchild} & set(descendants(os.getpid()))
    with pytest.raises(OSError):
        Resident.of(grandchild)


def test_processor_time_counts_children_that_were_waited_for():
    """And none of a process that is gone."""
    before = cpu_s([os.getpid()])
    burn = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    burn.wait()
    assert cpu_s([os.getpid()]) - before >= 0.25
    assert cpu_s([burn.pid]) == 0
