"""One sample: its loop under a deadline, to one outcome, whatever the loop does."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np

from zagent.client.calls import Calls
from zagent.errors import CallCancelled, DeadlineExceeded, LoopError, PromptTooLong, to_wire
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.registry import build_loop
from zagent.types import STANDARD_EXTRA_FIELDS, AgentLoopOutput
from zagent.wire.codec import encode_body
from zagent.worker.sample_llm import SampleServerManager

logger = logging.getLogger(__name__)


class AgentLoopWorker:
    """Runs samples, each as one coroutine of its own.

    Args:
        calls: the pending table that the samples' engine calls go through.
        tokenizer: transformers' tokenizer.
        trainer_config: handed to every loop.
    """

    def __init__(self, calls: Calls, tokenizer: Any, trainer_config: TrainerConfig) -> None:
        self._calls = calls
        self._tokenizer = tokenizer
        self._trainer_config = trainer_config

    async def run(self, row: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
        """Run one row (`zagent.trainer.rows.Row` as plain data) and describe its outcome as plain data:
        `status`, `output` (or None), `error` (`errors.to_wire`, or None), `attempt`.

        Whatever the loop raises ends this row only. Cancelling stops the loop and its engine calls.
        """
        llm = SampleServerManager(self._calls, row["seed_key"])
        try:
            output = await self._run_loop(row, llm, attempt)
            status = "partial" if llm.last_stop_reason == "abort" else "ok"
            outcome = {"status": status, "output": pack_output(output), "error": None, "attempt": attempt}
            encode_body(outcome["output"])  # a value of the loop's that cannot travel fails this row, by name
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in a loop, or a Rust library's panic, must not end the worker
            logger.warning("row %s (uid %s): %s: %s", row["index"], row["uid"], type(error).__name__, error)
            outcome = {"status": "failed", "output": None, "error": to_wire(error), "attempt": attempt}
        finally:
            await llm.end_sessions()
        return outcome

    async def _run_loop(self, row: dict[str, Any], llm: SampleServerManager, attempt: int) -> AgentLoopOutput:
        limit = self._trainer_config.rollout.trajectory_timeout_s
        try:
            async with asyncio.timeout(limit) as clock:
                loop = self._build(row, llm, attempt)
                output = await loop.run(dict(row["sampling_params"]), **row["kwargs"])
        except TimeoutError as error:
            if clock.expired():
                raise DeadlineExceeded(f"the trajectory took longer than {limit:g} s") from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise CallCancelled("the loop raised CancelledError though nobody cancelled it") from error
        return self._check(output, row, llm)

    def _build(self, row: dict[str, Any], llm: SampleServerManager, attempt: int) -> AgentLoopBase:
        loop = build_loop(
            row["agent_name"],
            {
                "trainer_config": self._trainer_config,
                "server_manager": llm,
                "tokenizer": self._tokenizer,
                "processor": None,
                "dataset_cls": None,
                "data_config": None,
            },
        )
        loop.attempt = attempt
        loop.row_name = f"row {row['index']} (uid {row['uid']}, sample {row['sample']})"
        return loop  # type: ignore[no-any-return]

    def _check(self, output: Any, row: dict[str, Any], llm: SampleServerManager) -> AgentLoopOutput:
        """The loop's output, complete: refused here, in its own row, what `collate` could not use."""
        name = row["agent_name"]
        if not isinstance(output, AgentLoopOutput):
            raise LoopError(f"agent loop {name!r} returned a {type(output).__name__}, not an AgentLoopOutput")
        limit = self._trainer_config.rollout.prompt_length
        if len(output.prompt_ids) > limit:
            raise PromptTooLong(
                f"agent loop {name!r} returned a prompt of {len(output.prompt_ids)} tokens, beyond {limit}"
            )
        versions = output.extra_fields.get("rollout_versions")
        if versions is not None and len(versions) != len(output.response_ids):
            raise LoopError(f"agent loop {name!r}: rollout_versions and response_ids differ in length")
        experts = output.routed_experts
        if experts is not None and not (isinstance(experts, np.ndarray) and experts.ndim == 3):
            raise LoopError(f"agent loop {name!r}: routed_experts must be an array [tokens, layers, experts per token]")
        if not isinstance(output.extra_fields.get("reward_extra_info", {}), dict):
            raise LoopError(f"agent loop {name!r}: reward_extra_info must be a dict")
        self._complete(output, llm)
        return output

    def _complete(self, output: AgentLoopOutput, llm: SampleServerManager) -> None:
        fields = output.extra_fields
        if llm.versions:
            fields.setdefault("min_global_steps", min(llm.versions))
            fields.setdefault("max_global_steps", max(llm.versions))
        fields.setdefault("cached_tokens", llm.cached_tokens)
        fields.setdefault("prompt_tokens", llm.prompt_tokens)
        for key in STANDARD_EXTRA_FIELDS:
            fields.setdefault(key, None)


def pack_output(output: AgentLoopOutput) -> dict[str, Any]:
    """An `AgentLoopOutput` as plain data with arrays, for the wire."""
    logprobs = output.response_logprobs
    return {
        "prompt_ids": np.asarray(output.prompt_ids, np.int32),
        "response_ids": np.asarray(output.response_ids, np.int32),
        "response_mask": np.asarray(output.response_mask, np.int32),
        "response_logprobs": None if logprobs is None else np.asarray(logprobs, np.float32),
        "routed_experts": output.routed_experts,
        "multi_modal_data": output.multi_modal_data,
        "reward_score": output.reward_score,
        "num_turns": output.num_turns,
        "metrics": output.metrics.model_dump(),
        "extra_fields": output.extra_fields,
    }
