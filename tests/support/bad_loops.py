"""Agent loops that do what loops must not do. Imported in workers by `rollout.imports`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import zagent


def output(**changes: Any) -> zagent.AgentLoopOutput:
    fields: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [1, 1], **changes}
    return zagent.AgentLoopOutput(**fields)


def loop(run: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``run`` as the `run` of a loop of that name."""
    zagent.register(run.__name__)(type(run.__name__, (zagent.AgentLoopBase,), {"run": run}))
    return run


@loop
async def raises(self: Any, params: dict[str, Any], **row: Any) -> Any:
    raise ValueError("made of cheese")


@loop
async def exits(self: Any, params: dict[str, Any], **row: Any) -> Any:
    sys.exit(3)


@loop
async def returns_none(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return None


@loop
def is_not_async(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output()


@loop
async def takes_no_row(self: Any, params: dict[str, Any]) -> Any:
    return output()


@loop
async def short_mask(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output(response_mask=[1])


@loop
async def changed_later(self: Any, params: dict[str, Any], **row: Any) -> Any:
    made = output()
    made.response_ids = [3, 4, 5]
    return made


@loop
async def short_versions(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output(extra_fields={"rollout_versions": [0]})


@loop
async def flat_experts(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output(routed_experts=[1, 2])


@loop
async def long_prompt(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output(prompt_ids=[1] * 500)


@loop
async def returns_a_set(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return output(extra_fields={"seen": {1, 2}})


@loop
async def unknown_id(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return await self.server_manager.generate("s", [1, 259], params)


@loop
async def negative_id(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return await self.server_manager.generate("s", [1, -1], params)


@loop
async def no_ids(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return await self.server_manager.generate("s", [], params)


@loop
async def unknown_parameter(self: Any, params: dict[str, Any], **row: Any) -> Any:
    return await self.server_manager.generate("s", [1], {**params, "max_tokns": 4})


@zagent.register("no_loop")
class NoLoop:
    """Has no `run`."""
