"""zagent: agentic rollouts for reinforcement learning of language models, on SGLang, without a cluster framework.

Public names are resolved on first use, so that importing zagent loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zagent.client.llm_client import AsyncLLMServerManager as AsyncLLMServerManager
    from zagent.client.services import Services as Services
    from zagent.config import Config as Config
    from zagent.data_proto import DataProto as DataProto
    from zagent.errors import *  # noqa: F403
    from zagent.loops.base import AgentLoopBase as AgentLoopBase
    from zagent.loops.environment import register_env as register_env
    from zagent.loops.interactions import BaseInteraction as BaseInteraction
    from zagent.loops.multi_turn import MultiTurnLoop as MultiTurnLoop
    from zagent.loops.parsers import FunctionCall as FunctionCall
    from zagent.loops.parsers import ParsedTurn as ParsedTurn
    from zagent.loops.parsers import register_parser as register_parser
    from zagent.loops.registry import register as register
    from zagent.loops.tools import BaseTool as BaseTool
    from zagent.loops.tools import ToolContext as ToolContext
    from zagent.loops.tools import ToolResponse as ToolResponse
    from zagent.loops.tools import tool as tool
    from zagent.service.base import idempotent as idempotent
    from zagent.trainer.check import LogprobCheck as LogprobCheck
    from zagent.trainer.check import LogprobStatistics as LogprobStatistics
    from zagent.trainer.check import check_logprobs as check_logprobs
    from zagent.trainer.collate import collate as collate
    from zagent.trainer.fully_async import FullyAsyncAgentLoopManager as FullyAsyncAgentLoopManager
    from zagent.trainer.groups import zero_variance as zero_variance
    from zagent.trainer.manager import AgentLoopManager as AgentLoopManager
    from zagent.trainer.one_step_off import OneStepOffAgentLoopManager as OneStepOffAgentLoopManager
    from zagent.trainer.rows import get_trajectory_info as get_trajectory_info
    from zagent.types import AgentLoopMetrics as AgentLoopMetrics
    from zagent.types import AgentLoopOutput as AgentLoopOutput
    from zagent.types import Outcome as Outcome
    from zagent.types import TokenOutput as TokenOutput
    from zagent.worker.runner import AgentLoopWorker as AgentLoopWorker
    from zagent.worker.trace import Tracer as Tracer


_HOME = {
    "AgentLoopBase": "zagent.loops.base",
    "AgentLoopManager": "zagent.trainer.manager",
    "AgentLoopMetrics": "zagent.types",
    "AgentLoopOutput": "zagent.types",
    "AgentLoopWorker": "zagent.worker.runner",
    "AsyncLLMServerManager": "zagent.client.llm_client",
    "BaseInteraction": "zagent.loops.interactions",
    "BaseTool": "zagent.loops.tools",
    "Config": "zagent.config",
    "DataProto": "zagent.data_proto",
    "LogprobCheck": "zagent.trainer.check",
    "LogprobStatistics": "zagent.trainer.check",
    "MultiTurnLoop": "zagent.loops.multi_turn",
    "FullyAsyncAgentLoopManager": "zagent.trainer.fully_async",
    "FunctionCall": "zagent.loops.parsers",
    "OneStepOffAgentLoopManager": "zagent.trainer.one_step_off",
    "Outcome": "zagent.types",
    "ParsedTurn": "zagent.loops.parsers",
    "Services": "zagent.client.services",
    "TokenOutput": "zagent.types",
    "Tracer": "zagent.worker.trace",
    "ToolContext": "zagent.loops.tools",
    "ToolResponse": "zagent.loops.tools",
    "check_logprobs": "zagent.trainer.check",
    "collate": "zagent.trainer.collate",
    "get_trajectory_info": "zagent.trainer.rows",
    "idempotent": "zagent.service.base",
    "register": "zagent.loops.registry",
    "register_parser": "zagent.loops.parsers",
    "tool": "zagent.loops.tools",
    "register_env": "zagent.loops.environment",
    "zero_variance": "zagent.trainer.groups",
}

__all__ = [*sorted(_HOME), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    errors = import_module("zagent.errors")
    if name in errors.known_errors():
        return getattr(errors, name)
    raise AttributeError(f"module 'zagent' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *import_module("zagent.errors").known_errors()})
