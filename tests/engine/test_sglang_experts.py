"""SGLang's routed experts, by hand-made answers: its own engine needs a GPU to record them."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zagent.config import EngineConfig, ModelConfig
from zagent.engine import sglang_arguments as setup
from zagent.engine import sglang_calls as calls
from zagent.errors import ConfigError, EngineError
from zagent.types import TokenOutput

#: Tokens of the prompt as SGLang counts them: with images expanded.
PROMPT = 5
SHAPE = (2, 3)


def experts(rows: int) -> np.ndarray:
    """Int32 [rows, layers, experts per token], every value another one."""
    return np.arange(rows * 6, dtype=np.int32).reshape(rows, *SHAPE)


def answer(
    ids: list[int], rows: np.ndarray | None, reason: str = "stop", logprobs: int | None = None, **meta: Any
) -> TokenOutput:
    """The output of SGLang's answer with ``ids`` and ``rows``, and log-probabilities for the first ``logprobs``."""
    encoded = None if rows is None else base64.b64encode(rows.tobytes()).decode()
    full: dict[str, Any] = {
        "finish_reason": {"type": reason},
        "prompt_tokens": PROMPT,
        "weight_version": "0",
        **({} if encoded is None else {"routed_experts": encoded}),
        **({} if logprobs is None else {"output_token_logprobs": [(-0.1, i, None) for i in ids[:logprobs]]}),
        **meta,
    }
    return calls.to_output({"output_ids": ids, "meta_info": full}, logprobs is not None, SHAPE)


def test_rows_are_decoded() -> None:
    """Base64 of int32 without a shape becomes [prompt + answer - 1, layers, experts per token]."""
    output = answer([7, 8, 9], experts(PROMPT + 3 - 1))
    assert output.routed_experts.dtype == np.int32
    assert output.routed_experts.shape == (7, *SHAPE)
    assert (output.routed_experts == experts(7)).all()


def test_rows_are_taken_only_where_they_were_asked_for() -> None:
    """Without a shape there are none, whatever SGLang sent."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "routed_experts": "AAAA"}
    assert calls.to_output({"output_ids": [1], "meta_info": meta}, logprobs=False).routed_experts is None


@pytest.mark.parametrize("rows", [None, np.empty((0, *SHAPE), np.int32), experts(6), experts(8)])
def test_rows_of_other_tokens_are_an_engine_error(rows: np.ndarray | None) -> None:
    """Missing, too few or too many: a finished answer never passes with routing that is not its own."""
    with pytest.raises(EngineError, match=r"routed experts, not 7 tokens of \(2, 3\)"):
        answer([7, 8, 9], rows)


def test_an_abort_keeps_rows_of_kept_tokens() -> None:
    """Tokens without log-probabilities are cut off an abort, and the last one in any case; their rows go with them."""
    cut = answer([7, 8, 9], experts(7), "abort", logprobs=1)
    assert cut.token_ids.tolist() == [7]
    assert (cut.routed_experts == experts(5)).all()
    whole = answer([7, 8, 9], experts(7), "abort", logprobs=3)
    assert (whole.routed_experts == experts(6)).all()


def test_an_abort_may_lack_rows() -> None:
    """A call that was aborted before SGLang collected them has its tokens and no rows."""
    output = answer([7, 8], None, "abort", logprobs=2)
    assert (output.token_ids.tolist(), output.routed_experts) == ([7], None)


def test_an_abort_without_tokens_has_no_rows() -> None:
    """None, also where SGLang sent the prompt's (pitfall D17: `[-0:]` would append them all)."""
    assert answer([], experts(4), "abort", logprobs=0).routed_experts is None
    assert answer([7], experts(5), "abort", logprobs=0).routed_experts is None
    in_queue = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    assert calls.to_output(in_queue, True, SHAPE).routed_experts is None


def test_the_shape_is_the_models() -> None:
    """All layers, as SGLang records them, where SGLang is told to record; else None."""
    model = SimpleNamespace(num_hidden_layers=48, num_experts_per_tok=8)
    assert setup.experts_shape(EngineConfig(args={"enable_return_routed_experts": True}), model) == (48, 8)
    assert setup.experts_shape(EngineConfig(args={"enable_return_routed_experts": False}), model) is None
    assert setup.experts_shape(EngineConfig(), SimpleNamespace(num_hidden_layers=2)) is None


@pytest.mark.parametrize("cpu", [True, False])
def test_recording_needs_a_gpu(cpu: bool) -> None:
    """On a CPU SGLang would die while it starts: refused before, with what works there."""

    def arguments() -> dict[str, Any]:
        engine = EngineConfig(args={"enable_return_routed_experts": True})
        return setup.server_arguments(ModelConfig(), engine, model_path="m", cpu=cpu, seed=0, nccl_port=1, port=2)

    if not cpu:
        assert arguments()["enable_return_routed_experts"] is True
        return
    with pytest.raises(ConfigError, match="enable_return_routed_experts needs a GPU"):
        arguments()
