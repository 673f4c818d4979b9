"""verl 0.9.1: a manager for its trainers, and agent loops written for it.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class=zagent.adapters.verl.AgentLoopManager` gives a trainer
zagent's rollouts; with `rollout.imports=[zagent.adapters.verl.loops, …]` zagent's workers run loops that import from
verl, whether it is installed there or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zagent.adapters.verl.manager import AgentLoopManager as AgentLoopManager


def __getattr__(name: str) -> Any:
    """The manager needs verl itself; loops do not."""
    if name == "AgentLoopManager":
        from zagent.adapters.verl.manager import AgentLoopManager

        return AgentLoopManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
