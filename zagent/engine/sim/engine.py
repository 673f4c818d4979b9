"""The simulated engine: real protocol, invented tokens, modelled time (docs/simulated-engine.md)."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import NoReturn

import numpy as np

from zagent.config import SimConfig
from zagent.engine.base import (
    Death,
    EngineInfo,
    GenerateRequest,
    Progress,
    check_media,
    check_prompt,
    token_budget,
)
from zagent.engine.sim.cache import BLOCK, PrefixCache, PrefixHasher
from zagent.engine.sim.experts import ExpertRouter
from zagent.engine.sim.faults import FaultScript, Verdict, parse_faults
from zagent.engine.sim.images import expand, mark
from zagent.engine.sim.pace import Pace, Places
from zagent.engine.sim.sampling import Answer, Sampler, Sampling, parse_sampling
from zagent.engine.sim.tokens import token_source
from zagent.errors import ConfigError, EngineError, InvalidRequest
from zagent.types import TokenOutput

#: Vocabulary where neither `engine.sim.vocab_size` nor a model says otherwise (Llama 2's).
DEFAULT_VOCAB_SIZE = 32_000


def build(
    *,
    sim: SimConfig,
    name: str,
    index: int,
    model_vocab_size: int | None = None,
    model_image_token_id: int | None = None,
    checkpoint_tokens: int = 0,
) -> SimEngine:
    """The simulated engine number ``index``, called ``name`` in errors. Raises `ConfigError`."""
    vocab_size = sim.vocab_size or model_vocab_size or DEFAULT_VOCAB_SIZE
    if sim.eos_token_id >= vocab_size:
        raise ConfigError(f"engine.sim.eos_token_id={sim.eos_token_id} is outside the vocabulary of {vocab_size}")
    image_token_id = model_image_token_id if sim.image_token_id is None else sim.image_token_id
    info = EngineInfo(vocab_size=vocab_size, context_length=sim.context_length, image_token_id=image_token_id)
    return SimEngine(sim, info, name, FaultScript(parse_faults(sim.faults, vocab_size), index), checkpoint_tokens)


class SimEngine:
    """Fulfils `zagent.engine.base.Engine` on whatever event loop starts it; waits only by that loop's clock."""

    died: asyncio.Future[Death]

    def __init__(
        self, sim: SimConfig, info: EngineInfo, name: str, faults: FaultScript, checkpoint_tokens: int = 0
    ) -> None:
        self.info = info
        self._name = name
        self._sim = sim
        self._faults = faults
        self._checkpoint_tokens = checkpoint_tokens
        source = token_source(info.vocab_size, sim.eos_token_id, sim.seed)
        self._sampler = Sampler(source, sim.eos_token_id, sim.eos_probability)
        self._router = (
            ExpertRouter(sim.moe_layers, sim.experts, sim.experts_per_token, sim.seed) if sim.moe_layers else None
        )
        self._hasher = PrefixHasher()
        self._cache = PrefixCache(sim.kv_capacity_tokens)
        self._places = Places(sim.max_batch)
        self._in_flight = 0
        self._started_at: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def start(self) -> None:
        """Ready at once; the fault script's clock starts here."""
        self._loop = asyncio.get_running_loop()
        self.died = self._loop.create_future()
        self._started_at = self._loop.time()
        for at_s, what in self._faults.timed_ends:
            self._timers.append(self._loop.call_later(at_s, self._end, what))

    async def generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        """Int32 ids, float32 log-probabilities, `cached_tokens` in steps of 64; without modelled latency at once.

        With `moe_layers`, `routed_experts` is int16 [prompt + answer - 1, moe_layers, experts_per_token]. Each image
        counts as `tokens_per_image` tokens.

        Raises:
            InvalidRequest: the request cannot be run, or the fault script refuses it.
            EngineError: not started, closed, or the fault script says so.
        """
        if self._started_at is None:
            raise EngineError(f"simulated engine {self._name} is not running")
        check_media(request, self.info)
        prompt_ids, marked_ids = self._read(request)
        check_prompt(prompt_ids, self.info)
        sampling = parse_sampling(request.sampling_params)
        budget = token_budget(request.sampling_params, prompt_ids.size, self.info)
        self._in_flight += 1
        try:
            verdict = self._faults.next_call(self._loop.time() - self._started_at, request.prompt_ids)
            self._strike(verdict)
            output = await self._in_place(marked_ids, sampling, budget, verdict, progress)
        finally:
            self._in_flight -= 1
        if request.images:
            output.extra_fields["prompt_token_ids"] = prompt_ids
        return output

    async def clear_cache(self) -> None:
        """Forget all prefixes. Raises `EngineError` while calls are in flight, as SGLang's flush does."""
        if self._in_flight:
            raise EngineError(f"simulated engine {self._name}: cache not cleared, {self._in_flight} calls in flight")
        self._cache.clear()

    def in_flight(self) -> int:
        """Calls running or waiting for a place in the batch."""
        return self._in_flight

    async def close(self) -> None:
        """No more calls, no more timed faults."""
        self._started_at = None
        for timer in self._timers:
            timer.cancel()
        self._cache.clear()

    def _read(self, request: GenerateRequest) -> tuple[np.ndarray, np.ndarray]:
        """The prompt as it is returned, and as answers depend on it."""
        image_token_id = self.info.image_token_id
        if image_token_id is None or not request.images:
            return request.prompt_ids, request.prompt_ids
        ids = expand(request.prompt_ids, image_token_id, self._sim.tokens_per_image)
        return ids, mark(ids, image_token_id, request.images, self.info.vocab_size)

    async def _in_place(
        self, prompt_ids: np.ndarray, sampling: Sampling, budget: int, verdict: Verdict, progress: Progress | None
    ) -> TokenOutput:
        pace = Pace(await self._places.take(self._loop.time()), verdict.factor)
        try:
            output = await self._run(prompt_ids, sampling, budget, verdict, progress, pace=pace)
        except BaseException:
            self._places.give_back(self._loop.time())
            raise
        self._places.give_back(pace.time)
        return output

    async def _run(
        self,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        budget: int,
        verdict: Verdict,
        progress: Progress | None,
        *,
        pace: Pace,
    ) -> TokenOutput:
        if verdict.effect == "hang" or self.died.done():
            await self._never()
        answer = self._sampler.answer(prompt_ids, sampling, budget)
        aborted = verdict.effect == "abort"
        if aborted:
            answer = answer.cut(answer.token_ids.size // 2)
        cached = await self._spend(prompt_ids, answer, pace, progress)
        if self.died.done():
            await self._never()
        output = _output(answer, cached, aborted=aborted)
        if self._router is not None and answer.token_ids.size:
            # As in SGLang, the last token has not been through the model.
            output.routed_experts = self._router.routed(np.concatenate([prompt_ids, output.token_ids])[:-1])
        return output

    async def _spend(self, prompt_ids: np.ndarray, answer: Answer, pace: Pace, progress: Progress | None) -> int:
        """Live through prefill and decode, keep the cache; returns the prompt tokens that were cached."""
        if not self._sim.kv_capacity_tokens:
            await pace.spend(prompt_ids.size, self._sim.prefill_tokens_per_s)
            await self._decode(answer, pace, progress)
            return 0
        # The last token of either has no KV: a prompt's is always computed, an answer's never entered the model.
        keys = self._hasher.keys(np.concatenate([prompt_ids, answer.token_ids])[:-1])
        prompt_keys = keys[: (prompt_ids.size - 1) // BLOCK]
        cached = self._cache.cached_tokens(prompt_keys)
        if self._sim.prefill_tokens_per_s or self._sim.decode_tokens_per_s:
            await pace.spend(prompt_ids.size - cached, self._sim.prefill_tokens_per_s)
            self._cache.insert(prompt_keys)
        await self._decode(answer, pace, progress)
        self._cache.insert(keys)
        return cached

    async def _decode(self, answer: Answer, pace: Pace, progress: Progress | None) -> None:
        """In pieces of `checkpoint_tokens` that ``progress`` is told of, and the last one."""
        size, step, done = answer.token_ids.size, self._checkpoint_tokens, 0
        if progress is not None and step:
            for end in range(step, size, step):
                await pace.spend(step, self._sim.decode_tokens_per_s)
                if self.died.done():
                    await self._never()
                progress(_output(answer.cut(end, done), 0, aborted=False))
                done = end
        await pace.spend(size - done, self._sim.decode_tokens_per_s)

    async def _never(self) -> NoReturn:
        """Wait until cancelled."""
        await self._loop.create_future()
        raise AssertionError("unreachable: nobody resolves that future")

    def _strike(self, verdict: Verdict) -> None:
        if verdict.effect in ("exit", "kill"):
            self._end(verdict.effect)
        elif verdict.effect == "error":
            raise EngineError(f"simulated engine {self._name}: error from the fault script")
        elif verdict.effect == "refuse":
            raise InvalidRequest(f"simulated engine {self._name}: refused by the fault script")

    def _end(self, what: str) -> None:
        """`exit`: die as an engine that notices its own end; `kill`: as a process that notices nothing."""
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.died.done():
            self.died.set_result(Death(f"simulated engine {self._name}: exit from the fault script", crashed=True))


def _output(answer: Answer, cached: int, *, aborted: bool) -> TokenOutput:
    return TokenOutput(
        token_ids=answer.token_ids,
        log_probs=answer.log_probs,
        stop_reason="abort" if aborted else answer.stop_reason,
        num_preempted=0,
        versions=[(0, 0, answer.token_ids.size)],
        cached_tokens=cached,
    )
