"""Bytes that one call and its answer take, as each peer writes them: headers and bodies, without the framing of TCP,
ZMTP, HTTP or gRPC. A relay or router in between carries them twice."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgpack
import numpy as np

from benchmarks.relay.peers import sockets
from benchmarks.relay.traffic import Case, Round, answer, prompts, sampling_params
from zagent.client.llm_client import pack_output
from zagent.types import TokenOutput
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Reply


def wire_bytes(peer: str, case: Case) -> int:
    """Of a typical call of ``case``."""
    prompt = np.asarray(prompts(Round(case, 1, 1, seed=1))[0], np.int32)
    ids, log_probs = answer(prompt, case.response)
    if peer in ("zagent", "sockets"):
        asked = sockets.header_bytes(case, "session-1-1000") + prompt.nbytes
        padding = sockets.header_bytes(case, "session-1-1000")
        return asked + (_zagent_reply(ids, log_probs) if peer == "zagent" else padding + ids.nbytes + log_probs.nbytes)
    if peer in ("http", "http-orjson", "sglang-router"):
        return _json(prompt.tolist(), ids.tolist(), log_probs.tolist(), case)
    values: tuple[Any, ...] = (prompt, ids, log_probs)
    if not case.as_lists:
        return sum(len(pickle.dumps(value, 5)) for value in values)
    return sum(len(msgpack.packb(value.tolist())) for value in values)  # Ray's own way with lists of numbers


def _zagent_reply(ids: np.ndarray, log_probs: np.ndarray) -> int:
    output = TokenOutput(ids, log_probs, "length", versions=[(0, 0, len(ids))])
    body = encode_body(pack_output(output))
    return len(encode_header(Reply(bytes(16), 1, 1))) + sum(memoryview(part).nbytes for part in body)


def _json(prompt: list[int], ids: list[int], log_probs: list[float], case: Case) -> int:
    asked = {"input_ids": prompt, "sampling_params": sampling_params(case), "return_logprob": True}
    entries = [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]
    told = {"text": "", "output_ids": ids, "meta_info": {"output_token_logprobs": entries}}
    return len(json.dumps(asked)) + len(json.dumps(told))
