"""A server of aiohttp that speaks like SGLang's: `/generate` takes and gives lists of ids as JSON."""

from __future__ import annotations

import asyncio
import logging
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

from benchmarks.relay.peers.json_codec import Codec, codec
from benchmarks.relay.traffic import list_answer
from zagent.client.process import run_main

#: A prompt of 32 768 ids is 200 KB of JSON; aiohttp refuses bodies over 1 MB.
LARGEST_BODY = 64 * 1024 * 1024
CODEC = web.AppKey("codec", Codec)


async def generate(request: web.Request) -> web.Response:
    """SGLang's form: per token [log-probability, id, None] in `meta_info`, beside the ids."""
    json = request.app[CODEC]
    body: dict[str, Any] = json.loads(await request.read())
    ids, log_probs = list_answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)],
    }
    answer = json.dumps({"text": "", "output_ids": ids, "meta_info": meta})
    return web.Response(body=answer, content_type="application/json")


async def healthy(request: web.Request) -> web.Response:
    return web.Response()


async def facts(request: web.Request) -> web.Response:
    """What sglang-router asks a server before it sends calls to it."""
    return web.json_response({"model_path": "echo", "served_model_name": "echo", "is_generation": True, "tp_size": 1})


def application(json: Codec) -> web.Application:
    app = web.Application(client_max_size=LARGEST_BODY)
    app[CODEC] = json
    app.router.add_post("/generate", generate)
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, healthy)
    for path in ("/get_server_info", "/get_model_info", "/server_info", "/model_info"):
        app.router.add_get(path, facts)
    return app


async def _serve(json: Codec, line: Connection) -> None:
    runner = web.AppRunner(application(json), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    line.send(f"http://{host}:{port}")
    await asyncio.Event().wait()


def main(settings: dict[str, Any], line: Connection) -> None:
    """Entry point; says its URL. sglang-router first tries gRPC, of which aiohttp complains."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    run_main(_serve(codec(settings["json"]), line))  # on uvloop where it is installed, as SGLang's server
