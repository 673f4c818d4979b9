"""Tests that cannot fail are no tests: with a known fault put in, they must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.mutations import MUTATIONS

TESTS = Path(__file__).parent
#: Where the fault must be seen.
SEEN_BY = {
    "shift_the_mask_by_one": "loops/test_tool.py",
    "drop_the_inserted_newline": "loops/test_tool.py",
    "reuse_the_request_id": "engine/test_engine_server.py",
    "change_the_sampling_params": "loops/test_tool.py",
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_known_fault_makes_tests_fail(mutation: str) -> None:
    """Fail, not break: pytest's status 1, with failed assertions."""
    command = [sys.executable, "-m", "pytest", "-p", "support.mutations", "-p", "no:cacheprovider", SEEN_BY[mutation]]
    environment = {**os.environ, "ZAGENT_MUTATION": mutation, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:]
    assert "AssertionError" in done.stdout
    assert "ERROR" not in done.stdout
