"""One sample: its loop under a deadline, to one outcome, whatever the loop does."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable
from typing import Any

import numpy as np
from pydantic import ValidationError

from zagent.client.calls import Calls
from zagent.errors import CallCancelled, DeadlineExceeded, LoopError, to_wire
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.registry import build_loop
from zagent.types import STANDARD_EXTRA_FIELDS, AgentLoopOutput
from zagent.worker.checks import check_encodes, check_output, refused_output
from zagent.worker.sample_llm import SampleServerManager
from zagent.worker.sampled import Sampled, response_versions

logger = logging.getLogger(__name__)

#: Seconds a loop may take to end once it is cancelled.
CANCEL_GRACE_S = 10.0


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
        llm = SampleServerManager(self._calls, row["seed_key"], self._trainer_config.rollout.response_length)
        try:
            output = await self._run_loop(row, llm, attempt)
            status = "partial" if llm.sampled.last_stop_reason == "abort" else "ok"
            packed = pack_output(output)
            check_encodes(packed, row["agent_name"])  # a value of the loop's that cannot travel fails this row only
            outcome = {"status": status, "output": packed, "error": None, "attempt": attempt}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() in a loop, or a Rust library's panic, must not end the worker
            logger.warning("%s: %s: %s", row_name(row), type(error).__name__, error)
            outcome = {"status": "failed", "output": None, "error": to_wire(error), "attempt": attempt}
        finally:
            await llm.end_sessions()
        return outcome

    async def _run_loop(self, row: dict[str, Any], llm: SampleServerManager, attempt: int) -> AgentLoopOutput:
        limit = self._trainer_config.rollout.trajectory_timeout_s
        try:
            async with asyncio.timeout(limit) as clock:
                output = await within_grace(self._start(row, llm, attempt))
        except ValidationError as error:
            if error.title != AgentLoopOutput.__name__:
                raise
            raise refused_output(error, row["agent_name"]) from error
        except TimeoutError as error:
            if clock.expired():
                raise DeadlineExceeded(f"the trajectory took longer than {limit:g} s") from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise CallCancelled("the loop raised CancelledError though nobody cancelled it") from error
        output = check_output(output, row["agent_name"], self._trainer_config.rollout.prompt_length)
        self._warn_of_cut(output, row)
        complete(output, llm.sampled)
        return output

    def _start(self, row: dict[str, Any], llm: SampleServerManager, attempt: int) -> Awaitable[Any]:
        running = self._build(row, llm, attempt).run(dict(row["sampling_params"]), **row["kwargs"])
        if not inspect.isawaitable(running):
            raise LoopError(f"agent loop {row['agent_name']!r}: run must be an `async def` that returns its output")
        return running

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
        if not callable(getattr(loop, "run", None)):
            raise LoopError(f"agent loop {row['agent_name']!r} makes a {type(loop).__name__}, which has no run()")
        loop.attempt = attempt
        loop.row_name = row_name(row)
        return loop  # type: ignore[no-any-return]

    def _warn_of_cut(self, output: AgentLoopOutput, row: dict[str, Any]) -> None:
        limit = self._trainer_config.rollout.response_length
        if len(output.response_ids) > limit:
            lost = len(output.response_ids) - limit
            logger.warning("%s: the response's last %d tokens, beyond %d, are cut", row_name(row), lost, limit)


def row_name(row: dict[str, Any]) -> str:
    """How log lines call a row."""
    return f"row {row['index']} (uid {row['uid']}, sample {row['sample']})"


def complete(output: AgentLoopOutput, sampled: Sampled) -> None:
    """Fill in what the loop has not said and its engine calls tell: versions, times, counts, the standard fields."""
    fields = output.extra_fields
    if fields.get("rollout_versions") is None:
        fields["rollout_versions"] = response_versions(output, sampled)
    if sampled.versions:
        fields.setdefault("min_global_steps", min(sampled.versions))
        fields.setdefault("max_global_steps", max(sampled.versions))
    fields.setdefault("cached_tokens", sampled.cached_tokens)
    fields.setdefault("prompt_tokens", sampled.prompt_tokens)
    for key in STANDARD_EXTRA_FIELDS:
        fields.setdefault(key, None)
    metrics = output.metrics
    if not metrics.generate_sequences:
        metrics.generate_sequences = sampled.seconds
    if metrics.num_preempted < 0 and sampled.num_preempted is not None:
        metrics.num_preempted = sampled.num_preempted


async def within_grace(work: Awaitable[Any]) -> Any:
    """The result of ``work``. Once cancelled it has `CANCEL_GRACE_S` to end; one that goes on is left behind, for the
    row must end (deadline, caller gone) whatever its loop does."""

    async def contained() -> tuple[Any, BaseException | None]:
        try:
            return await work, None
        except BaseException as error:  # SystemExit would end the event loop if it got out of a task
            return None, error

    task = asyncio.ensure_future(contained())
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_GRACE_S)
        if not task.done():
            logger.warning("an agent loop goes on though it was cancelled %g s ago: left behind", CANCEL_GRACE_S)
            raise
        if task.cancelled() or isinstance(task.result()[1], (asyncio.CancelledError, type(None))):
            raise
    result, error = task.result()
    if error is not None:
        raise error
    return result


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
