"""What an engine answers: the calls to one engine, as a member of its pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np

from zagent.client.continuing import may_continue, pack_piece
from zagent.client.link import Link
from zagent.client.llm_client import pack_output
from zagent.client.member import Member
from zagent.engine import sglang_parsers
from zagent.engine.base import Engine, GenerateRequest, Progress
from zagent.engine.chat import ChatTokenizer
from zagent.engine.memory import Memory
from zagent.engine.weights import EngineWeights
from zagent.errors import EngineError, InvalidRequest, Refused
from zagent.types import TokenOutput, int_array
from zagent.wire.messages import Call, Outdated


class EngineServer:
    """One engine as a member of its pool: methods `generate`, `chat`, `parse_tool_calls`, `clear_cache`, `stats`, and
    those of `EngineWeights`."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        chat_tokenizer: ChatTokenizer | None = None,
        *,
        checkpoints: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.engine = engine
        self._checkpoints = checkpoints  #: the engine tells of parts of its answers
        self.link = link
        self._chat_tokenizer = chat_tokenizer
        self.counts: Counter[str] = Counter()
        #: Resolved with the reason where the process is of no use any more, though its engine lives.
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._memory = memory or Memory("standalone")
        weights = EngineWeights(engine, self._memory, self._serves, self._fail)
        own = (self.generate, self.chat, self.parse_tool_calls, self.clear_cache, self.stats)
        self.member = Member(link, {method.__name__: method for method in (*own, *weights.methods)})
        link.on(Outdated, lambda message, body: weights.catch_up(message.version, message.weights))

    def _serves(self, version: int, directory: str) -> None:
        """Other weights than before, or asleep, or awake."""
        self.link.identity.facts.update(version=version, weights=directory, lacks=self._memory.lacks)
        self.link.announce()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    async def generate(self, argument: Any, call: Call) -> list[Any]:
        """[prompt ids, sampling params, images, videos] → `pack_output` of the answer; on the way `pack_piece` of its
        parts, where `engine.checkpoint_tokens` asks for them and another engine could go on from there."""
        request = read_request(argument, call)
        telling = self._telling(call) if self._checkpoints and may_continue(request.sampling_params) else None
        output = await self._generate(request, telling)
        if output.stop_reason == "abort" and (seen := self._first_placeholder(output)) is not None:
            output = output.cut(seen)
        return pack_output(output)

    def _telling(self, call: Call) -> Progress:
        """Sends pieces to the caller, up to the first with a placeholder in it: as part of a prompt that would ask for
        an image."""
        start: int | None = 0

        def tell(piece: TokenOutput) -> None:
            nonlocal start
            if start is None or self._first_placeholder(piece) is not None:
                start = None
                return
            self.member.progress(call, pack_piece(start, piece))
            start += len(piece.token_ids)

        return tell

    def _first_placeholder(self, output: TokenOutput) -> int | None:
        info = self.engine.info
        placeholders = [i for i in (info.image_token_id, info.video_token_id) if i is not None]
        found = np.flatnonzero(np.isin(output.token_ids, placeholders))
        return int(found[0]) if found.size else None

    async def chat(self, argument: Any, call: Call) -> str:
        """[messages, sampling params] → the answer's text without special tokens."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [list, dict]:
            raise InvalidRequest("chat takes [messages, sampling_params]")
        if self._chat_tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer")
        messages, params = argument
        ids = await self._chat_tokenizer.encode(messages)
        output = await self._generate(read_request([ids, params, None, None], call))
        if output.stop_reason == "abort":
            raise EngineError("the answer was aborted")
        return await self._chat_tokenizer.decode(np.asarray(output.token_ids))

    async def _generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        if self._memory.missing:
            raise Refused(f"nothing can be generated: {self._memory.missing}")  # the broker learns of it just now
        output = await self.engine.generate(request, progress)
        if output.log_probs is not None and not np.isfinite(output.log_probs).all():
            raise EngineError(
                f"log-probabilities that are no numbers, by weights of version {output.versions[-1][0]}: a NaN?"
            )
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += len(output.extra_fields.get("prompt_token_ids", request.prompt_ids))
        self.counts["cached_tokens"] += output.cached_tokens
        self.counts["response_tokens"] += len(output.token_ids)
        return output

    async def parse_tool_calls(self, argument: Any, call: Call) -> list[Any]:
        """[format, text, tool schemas] → [text around the calls, calls] (`sglang_parsers.parse`), in a thread."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [str, str, list]:
            raise InvalidRequest("parse_tool_calls takes [format, text, schemas]")
        format, text, schemas = argument
        tokenizer = getattr(self.engine, "tokenizer", None)
        return list(await asyncio.to_thread(sglang_parsers.parse, format, text, schemas, tokenizer))

    async def clear_cache(self, argument: Any, call: Call) -> None:
        """Forget all prefix KV."""
        await self.engine.clear_cache()

    async def stats(self, argument: Any, call: Call) -> dict[str, Any]:
        """Tokens and calls so far, and what the engine itself counts as in flight."""
        return {
            **{key: self.counts[key] for key in ("calls", "prompt_tokens", "cached_tokens", "response_tokens")},
            "in_flight": self.engine.in_flight(),
        }


def read_request(argument: Any, call: Call) -> GenerateRequest:
    """The engine call in a message; its request id is the call's id and attempt, so it is unique and of fixed length.

    Raises:
        InvalidRequest: the argument has another form.
    """
    if not isinstance(argument, list) or len(argument) != 4:
        raise InvalidRequest("generate takes [prompt_ids, sampling_params, images, videos]")
    prompt, params, images, videos = argument
    ids = int_array(prompt) if prompt is not None else None
    if ids is None:
        raise InvalidRequest("prompt_ids must be a one-dimensional array of 32-bit ints")
    if not isinstance(params, dict):
        raise InvalidRequest("sampling_params must be a map")
    rid = f"{call.call.hex()}{call.attempt:08x}"
    return GenerateRequest(rid, ids, params, _files("images", images), _files("videos", videos))


def _files(name: str, values: Any) -> list[bytes] | None:
    """Encoded files, which travel as uint8 arrays."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, np.ndarray) and v.dtype == np.uint8 for v in values):
        raise InvalidRequest(f"{name} must be a list of uint8 arrays, each an encoded file")
    return [value.tobytes() for value in values]
