"""HTTP and JSON without anything in between: each caller sends to the server that has the fewest of its own calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import aiohttp

from benchmarks.processes import Processes
from benchmarks.relay.caller import Caller
from benchmarks.relay.cluster import CallerProcesses, Shape
from benchmarks.relay.peers.json_codec import Codec, codec
from benchmarks.relay.traffic import Case

#: JSON knows no arrays.
FORMS = (True,)
PACE = 0.7
HEADERS = {"Content-Type": "application/json"}


def start(processes: Processes, shape: Shape, json: str = "json") -> CallerProcesses:
    """Servers and callers; ``json`` is the module that both read and write JSON with."""
    return callers(processes, shape.callers, start_servers(processes, shape.servers, json), json)


def start_servers(processes: Processes, number: int, json: str = "json") -> list[str]:
    """Their URLs."""
    entry = "benchmarks.relay.peers.http_server:main"
    return processes.start_ready([(f"server-{index}", entry, {"json": json}) for index in range(number)])


def callers(processes: Processes, number: int, urls: list[str], json: str = "json") -> CallerProcesses:
    settings = {"caller": f"{__name__}:caller", "urls": urls, "json": json}
    return CallerProcesses(processes, number, settings)


class Client:
    """Connections are kept alive, as many as there are calls in flight."""

    def __init__(self, urls: list[str], json: Codec, case: Case) -> None:
        self._json = json
        self._urls = [f"{url}/generate" for url in urls]
        self._in_flight = [0] * len(urls)
        self._params = {"max_new_tokens": case.response, "temperature": 1.0}

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=HEADERS)

    async def generate(self, session: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        which = min(range(len(self._urls)), key=self._in_flight.__getitem__)
        self._in_flight[which] += 1
        body = {"rid": session, "input_ids": prompt, "sampling_params": self._params, "return_logprob": True}
        try:
            async with self._session.post(self._urls[which], data=self._json.dumps(body)) as response:
                response.raise_for_status()
                answer = self._json.loads(await response.read())
        finally:
            self._in_flight[which] -= 1
        return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    async def close(self) -> None:
        await self._session.close()


def caller(settings: dict[str, Any]) -> Caller:
    """Made in the caller's process."""
    return Caller(partial(Client, settings["urls"], codec(settings["json"])))
