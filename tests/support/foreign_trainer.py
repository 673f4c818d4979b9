"""A trainer in an environment without sglang: `python foreign_trainer.py ENGINE_PYTHON LOGS`. Prints what it saw as
JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import zagent
from zagent.demo.questions import batch_of
from zagent.tiny.arithmetic import questions

ROWS = 8


def main(python: str, logs: str) -> None:
    config = zagent.Config.load(
        overrides=[
            *(f"engine.python={python}", "engine.count=1", "model.path=tiny", f"logs.dir={logs}"),
            *("worker.count=1", "rollout.agent=tool_agent", "rollout.imports=[zagent.demo.calculator]"),
            "rollout.multi_turn.format=qwen25",  # one of SGLang's: read where sglang is
        ]
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        out = manager.generate_sequences(batch_of(questions(7, ROWS), "row"))
        pools = manager.status()["pools"]
        report: dict[str, Any] = {
            "trainer_finds_sglang": importlib.util.find_spec("sglang") is not None,
            "commands": {
                name: Path(f"/proc/{member['pid']}/cmdline").read_bytes().split(b"\0")[0].decode()
                for pool in pools.values()
                for name, member in pool.items()
            },
            "imported": sorted(name for name in sys.modules if name.startswith(("sglang", "sgl_"))),
            "statuses": list(out.non_tensor_batch["status"]),
            "turns": out.non_tensor_batch["__num_turns__"].tolist(),
            "sampled": int(out.batch["response_mask"].sum()),
            "log_probs": float(out.batch["rollout_log_probs"].sum()),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
