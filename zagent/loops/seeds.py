"""Request seeds that depend on what is sampled, never on who samples it."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def seed_for(  # noqa: PLR0917 (callers pass Row.seed_key and the turn)
    rollout_seed: int, global_steps: int, validate: bool, uid_or_index: Any, sample: int, turn: int
) -> int:
    """The seed of one engine call, in [0, 2**63).

    ``turn`` is the number of the call within its trajectory, from 0. The same for any number of workers and any
    placement, process and machine: SHA-256 over the arguments as a JSON list. ``uid_or_index`` counts as its text, so
    that 7 and "7" agree however a data set stores its uids.
    """
    key = [int(rollout_seed), int(global_steps), bool(validate), str(uid_or_index), int(sample), int(turn)]
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
