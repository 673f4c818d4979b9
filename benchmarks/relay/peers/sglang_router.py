"""sglang-router in front of the servers of `http`: the same callers, with the router's URL as their only server."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.processes import PATIENCE_S, Failed, Processes
from benchmarks.relay.cluster import CallerProcesses, Shape
from benchmarks.relay.peers import http

FORMS = http.FORMS
PACE = 0.5
#: Of its policies that need no text the one that balances best; its default, cache_aware, compares prompts, too.
POLICY = "round_robin"


def start(processes: Processes, shape: Shape) -> CallerProcesses:
    """Servers, router, callers."""
    urls = http.start_servers(processes, shape.servers)
    port, metrics = free_ports(2)
    processes.start("router", f"{__name__}:route", {"port": port, "metrics": metrics, "urls": urls})
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(f"{url}/workers")
    return http.callers(processes, shape.callers, [url])


def route(settings: dict[str, Any], line: Connection) -> None:
    """Entry point; says nothing, and ends with the process."""
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    arguments = RouterArgs(
        host="127.0.0.1",
        port=settings["port"],
        worker_urls=settings["urls"],
        policy=POLICY,
        prometheus_port=settings["metrics"],
        log_level="error",
        worker_startup_check_interval=1,
    )
    Router.from_args(arguments).start()


def free_ports(number: int) -> list[int]:
    """Of this host, free a moment ago: the router takes no 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until_ready(url: str) -> None:
    """Until ``url`` answers 200. Raises `Failed`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise Failed(f"{url} did not answer within {PATIENCE_S:g} s")
