"""The simulated engine: real protocol, invented tokens, modelled time (docs/simulated-engine.md)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import numpy as np

from zagent.config import SimConfig
from zagent.engine.base import (
    Death,
    EngineInfo,
    GenerateRequest,
    PauseMode,
    Progress,
    TensorSpec,
    WeightsGroup,
    check_media,
    check_prompt,
    no_tokens,
    token_budget,
)
from zagent.engine.sim.experts import ExpertRouter
from zagent.engine.sim.faults import FaultScript, Verdict, parse_faults
from zagent.engine.sim.halt import Halt
from zagent.engine.sim.images import expand, mark
from zagent.engine.sim.model import SimCall, SimModel
from zagent.engine.sim.pace import Pace, Places
from zagent.engine.sim.sampling import Sampler, parse_sampling
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
        source = token_source(info.vocab_size, sim.eos_token_id, sim.seed)
        self._halt = Halt()
        sampler = Sampler(source, sim.eos_token_id, sim.eos_probability)
        self._model = SimModel(sim, sampler, self._halt, checkpoint_tokens)
        self._router = (
            ExpertRouter(sim.moe_layers, sim.experts, sim.experts_per_token, sim.seed) if sim.moe_layers else None
        )
        self._places = Places(sim.max_batch)
        self._in_flight = 0
        self._weights: list[tuple[str, int]] = []
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
            if not await self._halt.enter():
                return no_tokens("abort", logprobs=sampling.log_probs)
            try:
                verdict = self._faults.next_call(self._loop.time() - self._started_at, request.prompt_ids)
                self._strike(verdict)
                call = SimCall(marked_ids, sampling, budget, aborts=verdict.effect == "abort")
                output = await self._in_place(call, verdict, progress)
            finally:
                self._halt.leave()
        finally:
            self._in_flight -= 1
        if request.images:
            output.extra_fields["prompt_token_ids"] = prompt_ids
        return output

    async def clear_cache(self) -> None:
        """Forget all prefixes. Raises `EngineError` while calls are in flight, as SGLang's flush does."""
        if self._in_flight:
            raise EngineError(f"simulated engine {self._name}: cache not cleared, {self._in_flight} calls in flight")
        self._model.forget()

    @property
    def version(self) -> int:
        """Of the weights: other tokens with each."""
        return self._model.version

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`, at whichever token the modelled time has come to."""
        await self._halt.begin(mode)

    async def resume(self) -> None:
        self._halt.end()

    async def update_weights(self, directory: str, version: int, *, flush: bool) -> None:
        """Of the files only the names and sizes matter, and they must be there."""
        weights = _sizes(Path(directory))
        if not weights:
            raise EngineError(f"simulated engine {self._name}: no safetensors in {directory}")
        self._weights, self._model.version = weights, version
        if flush:
            self._model.forget()

    async def join_group(self, group: WeightsGroup) -> None:
        raise InvalidRequest("simulated engines take no tensors: send weights by transport='disk'")

    async def leave_group(self, name: str) -> None:
        """There is none."""

    async def receive_weights(self, name: str, tensors: Sequence[TensorSpec], version: int, *, flush: bool) -> None:
        raise InvalidRequest(f"simulated engine {self._name} is in no group {name!r}")

    async def checksum(self) -> str:
        return blake2b(repr((self._model.version, self._weights)).encode(), digest_size=8).hexdigest()

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Nothing, but KV is forgotten."""
        self._model.forget()
        return dict.fromkeys(tags, 0)

    async def restore(self, tags: Sequence[str]) -> None:
        """Nothing."""

    def in_flight(self) -> int:
        """Calls running or waiting for a place in the batch."""
        return self._in_flight

    async def close(self) -> None:
        """No more calls, no more timed faults."""
        self._started_at = None
        for timer in self._timers:
            timer.cancel()
        self._model.forget()

    def _read(self, request: GenerateRequest) -> tuple[np.ndarray, np.ndarray]:
        """The prompt as it is returned, and as answers depend on it."""
        image_token_id = self.info.image_token_id
        if image_token_id is None or not request.images:
            return request.prompt_ids, request.prompt_ids
        ids = expand(request.prompt_ids, image_token_id, self._sim.tokens_per_image)
        return ids, mark(ids, image_token_id, request.images, self.info.vocab_size)

    async def _in_place(self, call: SimCall, verdict: Verdict, progress: Progress | None) -> TokenOutput:
        pace = Pace(await self._places.take(self._loop.time()), verdict.factor, self._halt)
        try:
            if verdict.effect == "hang" or self.died.done():
                await self._never()
            output = await self._model.run(call, pace, progress and self._while_alive(progress))
            if self.died.done():
                await self._never()
        except BaseException:
            self._places.give_back(self._loop.time())
            raise
        self._places.give_back(pace.time)
        if self._router is not None and len(output.token_ids):
            # As in SGLang, the last token has not been through the model.
            output.routed_experts = self._router.routed(np.concatenate([call.prompt_ids, output.token_ids])[:-1])
        return output

    def _while_alive(self, progress: Progress) -> Progress:
        """The dead say nothing."""
        return lambda piece: None if self.died.done() else progress(piece)

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


def _sizes(directory: Path) -> list[tuple[str, int]]:
    return sorted((file.name, file.stat().st_size) for file in directory.glob("*.safetensors"))
