"""The simulated model: one call's way through prefill and decode, under whatever weights there are meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zagent.client.continuing import joined
from zagent.config import SimConfig
from zagent.engine.base import Progress
from zagent.engine.sim.cache import BLOCK, PrefixCache, PrefixHasher
from zagent.engine.sim.halt import Halt
from zagent.engine.sim.pace import Pace
from zagent.engine.sim.sampling import Answer, Sampler, Sampling
from zagent.types import TokenOutput

#: Odd, so that every version of the weights gives every block another name: KV of other weights is not found.
VERSION_SALT = 0x9E37_79B9_7F4A_7C15


class SimCall(NamedTuple):
    """``prompt_ids`` int32 [tokens], as answers depend on them; ``budget`` in tokens; ``aborts``: half-way."""

    prompt_ids: np.ndarray
    sampling: Sampling
    budget: int
    aborts: bool = False


class SimModel:
    """Tokens, their times and their KV.

    Args:
        halt: breaks calls off, or freezes them.
        checkpoint_tokens: tokens after which a call's `Progress` is told; 0 = never.
    """

    def __init__(self, sim: SimConfig, sampler: Sampler, halt: Halt, checkpoint_tokens: int = 0) -> None:
        #: Of the weights: other ones give other tokens.
        self.version = 0
        self._sim, self._sampler, self._halt = sim, sampler, halt
        self._checkpoint_tokens = checkpoint_tokens
        self._hasher = PrefixHasher()
        self._cache = PrefixCache(sim.kv_capacity_tokens)

    def forget(self) -> None:
        """All KV."""
        self._cache.clear()

    async def run(self, call: SimCall, pace: Pace, progress: Progress | None) -> TokenOutput:
        """The answer; if it is broken off, what there is of it, with `stop_reason` "abort"."""
        version, cached = self.version, 0
        answer = self._answer(call)
        keys: list[int] = []
        if self._sim.kv_capacity_tokens:
            # The last token of either has no KV: a prompt's is always computed, an answer's never entered the model.
            keys = self._keys(np.concatenate([call.prompt_ids, answer.token_ids])[:-1], version)
            prompt_keys = keys[: (call.prompt_ids.size - 1) // BLOCK]
            cached = self._cache.cached_tokens(prompt_keys)
        if not await self._spend(call.prompt_ids.size - cached, self._sim.prefill_tokens_per_s, pace):
            return _output(answer.cut(0), version, aborted=True)
        if keys and (self._sim.prefill_tokens_per_s or self._sim.decode_tokens_per_s):
            self._cache.insert(prompt_keys)
        output = await self._decode(call, answer if self.version == version else self._answer(call), pace, progress)
        if keys and len(output.token_ids) != answer.token_ids.size:
            keys = self._keys(np.concatenate([call.prompt_ids, output.token_ids])[:-1], version)
        if keys:
            self._cache.insert(keys)
        output.cached_tokens = cached
        return output

    def _answer(self, call: SimCall) -> Answer:
        """Under the weights of the moment."""
        answer = self._sampler.answer(call.prompt_ids, call.sampling, call.budget, self.version)
        return answer.cut(answer.token_ids.size // 2) if call.aborts else answer

    def _keys(self, ids: np.ndarray, version: int) -> list[int]:
        keys = self._hasher.keys(ids)
        return [key ^ (version * VERSION_SALT) for key in keys] if version else keys

    async def _spend(self, tokens: int, tokens_per_s: float, pace: Pace) -> bool:
        """Live through so many tokens, frozen or not; False if broken off on the way."""
        while (done := await pace.spend(tokens, tokens_per_s)) < tokens:
            if not await self._goes_on(pace):
                return False
            tokens -= done
        return True

    async def _goes_on(self, pace: Pace) -> bool:
        """A halt has come: wait for its end, unless it breaks the call off."""
        pace.time += await self._halt.frozen()
        return self._halt.mode != "abort"

    async def _decode(self, call: SimCall, answer: Answer, pace: Pace, progress: Progress | None) -> TokenOutput:
        """In stretches, each under one version of the weights."""
        stretches: list[TokenOutput] = []
        while True:
            version = self.version
            done = await self._stretch(answer, version, pace, progress)
            whole = done == answer.token_ids.size
            stretches.append(_output(answer.cut(done), version, aborted=not whole or call.aborts))
            if whole or not await self._goes_on(pace):
                return stretches[0] if len(stretches) == 1 else _whole(stretches)
            call = _rest(call, answer.token_ids[:done])
            answer = self._answer(call)

    async def _stretch(self, answer: Answer, version: int, pace: Pace, progress: Progress | None) -> int:
        """Tokens until the end, or a halt; ``progress`` is told of every `checkpoint_tokens`, and of what there is when
        they freeze, but never of the last."""
        size, step, done = answer.token_ids.size, self._checkpoint_tokens, 0
        if progress is None or not step:
            return await pace.spend(size, self._sim.decode_tokens_per_s)
        while done < size:
            asked = min(step, size - done)
            count = await pace.spend(asked, self._sim.decode_tokens_per_s)
            end = done + count
            if done < end < size and (count == asked or self._halt.mode == "in_place"):
                progress(_output(answer.cut(end, done), version, aborted=False))
            done = end
            if count < asked:
                break
        return done


def _rest(call: SimCall, sampled: np.ndarray) -> SimCall:
    """What is left of ``call`` after these tokens."""
    least = max(0, call.sampling.min_new_tokens - sampled.size)
    return call._replace(
        prompt_ids=np.concatenate([call.prompt_ids, sampled]),
        sampling=call.sampling._replace(min_new_tokens=least),
        budget=call.budget - sampled.size,
    )


def _output(answer: Answer, version: int, *, aborted: bool) -> TokenOutput:
    return TokenOutput(
        token_ids=answer.token_ids,
        log_probs=answer.log_probs,
        stop_reason="abort" if aborted else answer.stop_reason,
        num_preempted=0,
        versions=[(version, 0, answer.token_ids.size)],
    )


def _whole(stretches: list[TokenOutput]) -> TokenOutput:
    """One answer of them."""
    if not any(len(one.token_ids) for one in stretches):
        return stretches[-1]
    tokens = joined(stretches)
    return replace(stretches[-1], token_ids=tokens.token_ids, log_probs=tokens.log_probs, versions=tokens.versions)
