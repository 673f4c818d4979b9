"""One sample: its loop under a deadline, to one outcome, whatever the loop does."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import numpy as np
from pydantic import ValidationError

from zagent.client.calls import Calls
from zagent.client.services import Services
from zagent.errors import LoopError, ZagentError, to_wire
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.interactions import BaseInteraction
from zagent.loops.limited import limited
from zagent.loops.registry import build_loop
from zagent.loops.tokenizer import in_tokenizer_thread
from zagent.loops.tools import Toolbox
from zagent.types import STANDARD_EXTRA_FIELDS, AgentLoopOutput
from zagent.worker.checks import check_encodes, check_output, refused_output
from zagent.worker.equip import equip, select
from zagent.worker.reward import Finished, Reward
from zagent.worker.sample_llm import SampleServerManager
from zagent.worker.sampled import Sampled, response_versions
from zagent.worker.trace import RowTrace, Tracing, named, silent

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """One run of one row. ``session`` (hex) is its own."""

    row: dict[str, Any]
    number: int
    session: str
    trace: RowTrace | Callable[..., None]
    llm: SampleServerManager
    services: Services


class AgentLoopWorker:
    """Runs samples, each as one coroutine of its own.

    Args:
        calls: the pending table that the samples' engine and service calls go through.
        tokenizer: transformers' tokenizer.
        trainer_config: handed to every loop.
        toolbox: the configured tools; rows select from it by their column `tools`, where that holds names.
        interactions: the configured ones, by name.
        reward: scores rows whose loops do not.
        tracing: told of everything.
        services: the cluster's; rows get them bound to a session of their own.
        processor: the image processor of a model that sees, else None.
    """

    def __init__(
        self,
        calls: Calls,
        tokenizer: Any,
        trainer_config: TrainerConfig,
        *,
        toolbox: Toolbox | None = None,
        interactions: Mapping[str, BaseInteraction] = MappingProxyType({}),
        reward: Reward | None = None,
        tracing: Tracing | None = None,
        services: Services | None = None,
        processor: Any = None,
    ) -> None:
        self._calls = calls
        self._tokenizer = tokenizer
        self._processor = processor
        self._trainer_config = trainer_config
        self._rollout = trainer_config.rollout
        self._toolbox = toolbox
        self._interactions = interactions
        self._reward = reward
        self._tracing = tracing
        self._services = services if services is not None else Services(calls, ())

    async def run(self, row: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
        """Run one row (`zagent.trainer.rows.Row` as plain data) and describe its outcome as plain data:
        `status`, `output` (or None), `error` (`errors.to_wire`, or None), `attempt`.

        Whatever the loop or the reward function raises ends this row only. Cancelling stops both, and their calls.
        """
        this = self._attempt(row, attempt)
        this.trace("start", agent=row["agent_name"], sampling_params=row["sampling_params"])
        output: AgentLoopOutput | None = None
        try:
            output = await self._scored_output(this)
            status, error = "partial" if this.llm.sampled.last_stop_reason == "abort" else "ok", None
        except asyncio.CancelledError:
            this.trace("end", **_end("cancelled", None, None))
            raise
        except BaseException as failure:  # sys.exit() in a loop, or a Rust library's panic, must not end the worker
            bug = None if isinstance(failure, ZagentError) else failure  # the user's code: where it was raised
            logger.warning("%s: %s: %s", row_name(row), type(failure).__name__, failure, exc_info=bug)
            status, error = "failed", failure
        finally:
            await this.services.end_session()
        this.trace("end", **_end(status, output, error))
        packed = None if output is None else pack_output(output)
        return {
            "status": status,
            "output": packed,
            "error": None if error is None else to_wire(error),
            "attempt": attempt,
        }

    def _attempt(self, row: dict[str, Any], number: int) -> Attempt:
        session = uuid4().hex
        trace = None if self._tracing is None else RowTrace(self._tracing, row, number, session)
        rollout = self._rollout
        llm = SampleServerManager(
            *(self._calls, row["seed_key"], rollout.response_length, trace), partial_rollout=rollout.partial_rollout
        )
        return Attempt(row, number, session, trace or silent, llm, self._services.bind(session))

    async def _scored_output(self, this: Attempt) -> AgentLoopOutput:
        try:
            output = await self._run_loop(this)
        finally:
            await this.llm.end_sessions()  # the reward, which may take long, needs no engine's cache
        check_encodes(pack_output(output), this.row["agent_name"])  # what cannot travel fails this row only
        if self._reward is not None and output.reward_score is None:
            await self._score(this, output, self._reward)
        return output

    async def _run_loop(self, this: Attempt) -> AgentLoopOutput:
        row, rollout = this.row, self._rollout
        try:
            output = await limited(self._start(this), rollout.trajectory_timeout_s, "the trajectory")
        except ValidationError as error:
            if error.title != AgentLoopOutput.__name__:
                raise
            raise refused_output(error, row["agent_name"]) from error
        output = check_output(output, row["agent_name"], rollout.prompt_length, rollout.response_length)
        self._warn_of_cut(output, row)
        complete(output, this.llm.sampled)
        return output

    async def _start(self, this: Attempt) -> Any:
        row = this.row
        running = self._build(this).run(dict(row["sampling_params"]), **row["kwargs"])
        if not inspect.isawaitable(running):
            raise LoopError(f"agent loop {row['agent_name']!r}: run must be an `async def` that returns its output")
        return await running

    def _build(self, this: Attempt) -> AgentLoopBase:
        name = this.row["agent_name"]
        loop = build_loop(
            name,
            {
                "trainer_config": self._trainer_config,
                "server_manager": this.llm,
                "tokenizer": self._tokenizer,
                "processor": self._processor,
                "dataset_cls": None,
                "data_config": None,
            },
        )
        if not callable(getattr(loop, "run", None)):
            raise LoopError(f"agent loop {name!r} makes a {type(loop).__name__}, which has no run()")
        equip(
            loop,
            attempt=this.number,
            row_key=row_key(this.row),
            row_name=row_name(this.row),
            session=this.session,
            services=this.services,
            trace=this.trace,
            tools=select(self._toolbox, this.row["kwargs"].get("tools")),
            interactions=self._interactions,
        )
        return loop  # type: ignore[no-any-return]

    async def _score(self, this: Attempt, output: AgentLoopOutput, reward: Reward) -> None:
        """Fill in score, `reward_extra_info` and the time it took. Raises `RewardError` under `on_error=fail`."""
        clock = asyncio.get_running_loop().time
        started = clock()
        text = await self._text(output)
        scored = await reward.score(
            Finished(this.row["kwargs"], this.row["trajectory"], output, text, this.services, this.number)
        )
        seconds = clock() - started
        output.metrics.compute_score += seconds
        error = None if scored.error is None else str(scored.error)
        this.trace("reward", score=scored.score, info=scored.info, error=error, seconds=seconds)
        if scored.error is not None:
            logger.warning("%s has no score: %s (whole: %r)", row_name(this.row), error, text)
            if reward.needed:
                raise scored.error
        output.reward_score = scored.score
        if scored.info:
            known = output.extra_fields.get("reward_extra_info") or {}
            output.extra_fields["reward_extra_info"] = {**known, **scored.info}

    async def _text(self, output: AgentLoopOutput) -> str:
        ids = [int(token) for token in output.response_ids[: self._rollout.response_length]]
        return await in_tokenizer_thread(lambda: str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    def _warn_of_cut(self, output: AgentLoopOutput, row: dict[str, Any]) -> None:
        limit = self._rollout.response_length
        if len(output.response_ids) > limit:
            lost = len(output.response_ids) - limit
            logger.warning("%s: the response's last %d tokens, beyond %d, are cut", row_name(row), lost, limit)


def _end(status: str, output: AgentLoopOutput | None, error: BaseException | None) -> dict[str, Any]:
    """What the `end` event tells."""
    return {
        "status": status,
        "error": None if error is None else named(error),
        "num_turns": output.num_turns if output else 0,
        "reward_score": output.reward_score if output else None,
        "metrics": output.metrics.model_dump() if output else None,
    }


def row_key(row: dict[str, Any]) -> str:
    """What all attempts at a row have in common, and none of another row of its step has."""
    _, step, validate, uid, sample = row["seed_key"]
    return f"{step}/{'validate/' if validate else ''}{uid}/{sample}"


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
