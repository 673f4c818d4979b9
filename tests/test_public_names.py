"""`import zagent` offers what it promises, lazily."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zagent

PROMISED = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "BaseInteraction",
    "BaseTool",
    "Config",
    "DataProto",
    "FullyAsyncAgentLoopManager",
    "FunctionCall",
    "LogprobCheck",
    "LogprobStatistics",
    "MultiTurnLoop",
    "OneStepOffAgentLoopManager",
    "Outcome",
    "ParsedTurn",
    "Services",
    "TokenOutput",
    "ToolContext",
    "ToolResponse",
    "Tracer",
    "check_logprobs",
    "collate",
    "get_trajectory_info",
    "idempotent",
    "register",
    "register_env",
    "register_parser",
    "tool",
    "zero_variance",
]


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_name_is_there(name: str) -> None:
    """Under its own name, and in `__all__` and `dir()`."""
    assert getattr(zagent, name).__name__ == name
    assert name in zagent.__all__
    assert name in dir(zagent)


def test_all_is_what_is_promised() -> None:
    """Nothing public by accident."""
    assert sorted(zagent.__all__) == sorted([*PROMISED, "__version__"])


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING are those that are resolved on first use."""
    tree = ast.parse(Path(zagent.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {a.name: n.module for n in guarded.body if isinstance(n, ast.ImportFrom) for a in n.names if a.name != "*"}
    assert seen == zagent._HOME


def test_the_error_tree_is_public() -> None:
    """Each class by its name."""
    assert zagent.RolloutError.__name__ == "RolloutError"
    assert issubclass(zagent.PromptTooLong, zagent.InvalidRequest)


def test_another_name_is_an_attribute_error() -> None:
    """As in any module."""
    with pytest.raises(AttributeError, match="module 'zagent' has no attribute 'nonsense'"):
        _ = zagent.nonsense


HEAVY = {"torch", "transformers", "sglang", "zmq", "tokenizers", "hydra"}


def loaded_after(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after ``code``."""
    watched = HEAVY | {"numpy", "pydantic", "omegaconf", "pandas"}
    script = f"{code}\nimport sys; print(*sorted({watched!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_zagent_loads_nothing_heavy() -> None:
    """Neither torch nor transformers nor zmq, nor even numpy."""
    assert loaded_after("import zagent; zagent.ConfigError") == set()


def test_a_text_worker_loads_neither_torch_nor_sglang() -> None:
    """Its server module and a fast tokenizer: many workers stay cheap."""
    tests = str(Path(__file__).parent)
    code = f"""
import sys; sys.path.insert(0, {tests!r})
import zagent.worker.server, zagent.loops.single_turn
from zagent.loops.registry import find_loop; find_loop('single_turn_agent')
from zagent.loops.tokenizer import load_tokenizer, probe
from support.tiny_tokenizer import saved_tokenizer
import tempfile, pathlib
with tempfile.TemporaryDirectory() as directory:
    probe(load_tokenizer(saved_tokenizer(pathlib.Path(directory))))
"""
    assert loaded_after(code) & {"torch", "sglang", "pandas"} == set()


def test_the_broker_loads_only_what_it_routes_with() -> None:
    """zmq and the codec's numpy; no torch, no transformers, no configuration."""
    assert loaded_after("import zagent.broker.server") == {"zmq", "numpy"}


def test_a_simulated_engine_loads_no_torch() -> None:
    """Hundreds of them fit on a laptop."""
    assert loaded_after("import zagent.engine.server, zagent.engine.sim") & {"torch", "sglang", "transformers"} == set()
