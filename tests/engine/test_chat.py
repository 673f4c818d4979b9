"""Text in, text out at an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.tiny_tokenizer import saved_tokenizer, tiny_tokenizer
from zagent.client.services import Services
from zagent.engine.chat import ChatTokenizer
from zagent.engine.methods import EngineServer
from zagent.engine.server import _load_tokenizer
from zagent.errors import EngineError, InvalidRequest

MESSAGES = [{"role": "user", "content": "Good?"}]


async def judge(cluster: Cluster, tokenizer: Any = None, **sim: Any) -> EngineServer:
    server = await cluster.engine(pool="judge", vocab_size=259, **sim)
    server._chat_tokenizer = ChatTokenizer(tokenizer or tiny_tokenizer)
    return server


def chatting(test: Any) -> Any:
    async def main() -> Any:
        async with Cluster(pools=("judge",)) as cluster:
            return await test(cluster)

    return asyncio.run(main())


async def services(cluster: Cluster) -> Any:
    return Services(await cluster.caller(), ["judge"], engines=["judge"])["judge"]


def test_the_models_own_template_and_tokenizer_are_used() -> None:
    """The prompt ends with the generation prompt; the answer is the decoded ids without special tokens."""

    async def test(cluster: Cluster) -> None:
        server = await judge(cluster, eos_probability=0.2, eos_token_id=258)
        seen: list[Any] = []
        generate = server.engine.generate

        async def noted(request: Any, progress: Any = None) -> Any:
            output = await generate(request)
            seen.append((request, output))
            return output

        server.engine.generate = noted  # type: ignore[method-assign]
        for seed in range(20):
            answer = await (await services(cluster)).chat(MESSAGES, {"max_new_tokens": 8, "sampling_seed": seed})
            request, output = seen[-1]
            tokenizer = tiny_tokenizer()
            assert tokenizer.decode(request.prompt_ids) == "<|im_start|>user\nGood?<|im_end|>\n<|im_start|>assistant\n"
            assert answer == tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert any(output.stop_reason == "stop" for _, output in seen)
        assert server.counts["calls"] == 20

    chatting(test)


def test_the_tokenizer_is_loaded_once(tmp_path: Path) -> None:
    """By the first call, from the model's own place or the tokenizer's."""
    loads: list[str] = []

    def load(model: dict[str, Any]) -> Any:
        loads.append("loaded")
        return _load_tokenizer({"model": model})

    async def test(cluster: Cluster) -> None:
        await judge(cluster, lambda: load({"path": "/nowhere", "tokenizer_path": saved_tokenizer(tmp_path)}))
        pool = await services(cluster)
        assert loads == []
        await asyncio.gather(*(pool.chat(MESSAGES, {"max_new_tokens": 2}) for _ in range(3)))
        assert loads == ["loaded"]

    chatting(test)


def test_messages_that_cannot_be_rendered_are_the_callers_fault() -> None:
    """The template's own words are told."""

    def refusing() -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        return tokenizer

    async def test(cluster: Cluster) -> None:
        await judge(cluster, refusing)
        with pytest.raises(InvalidRequest, match=r"chat cannot render these messages: .*roles must alternate"):
            await (await services(cluster)).chat(MESSAGES)

    chatting(test)


def test_a_tokenizer_that_cannot_be_loaded_is_named() -> None:
    """In that call."""

    async def test(cluster: Cluster) -> None:
        await judge(cluster, lambda: _load_tokenizer({"model": {"path": "/nowhere"}}))
        with pytest.raises(InvalidRequest, match=r"chat cannot render these messages: \w+: .*nowhere"):
            await (await services(cluster)).chat(MESSAGES)

    chatting(test)


@pytest.mark.parametrize("argument", [None, [], [[], {}, 1], ["text", {}], [[], []], [{}, {}]], ids=repr)
def test_an_argument_of_another_form_is_refused(argument: Any) -> None:
    """Any peer may send it."""

    async def test(cluster: Cluster) -> None:
        await judge(cluster)
        with pytest.raises(InvalidRequest, match=r"chat takes \[messages, sampling_params\]"):
            await (await cluster.caller()).call("judge", "chat", argument)

    chatting(test)


def test_an_aborted_answer_never_passes_for_one() -> None:
    """It is an error."""

    async def test(cluster: Cluster) -> None:
        await judge(cluster, faults=({"do": "abort", "every": 1},))
        with pytest.raises(EngineError, match="aborted"):
            await (await services(cluster)).chat(MESSAGES, {"max_new_tokens": 8})

    chatting(test)
