"""What a loop gets from its base class."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest

from support.tiny_tokenizer import tiny_tokenizer
from zagent.config import RolloutConfig
from zagent.errors import InvalidRequest, PromptTooLong, TemplateError
from zagent.loops.base import AgentLoopBase, TrainerConfig, check_media, with_budget
from zagent.types import AgentLoopOutput

MESSAGES = [{"role": "user", "content": "hé"}]


class Loop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise NotImplementedError


def loop(context: int | None = None, processor: Any = None, **rollout: Any) -> Loop:
    config = TrainerConfig(RolloutConfig(**rollout), context)
    return Loop(config, None, tiny_tokenizer(), processor)  # type: ignore[arg-type]


def test_a_loop_has_verls_attributes() -> None:
    """And starts as attempt 1 of a row."""
    made = Loop(TrainerConfig(RolloutConfig()), "manager", "tokenizer", "processor", dataset_cls=int, extra=1)  # type: ignore[arg-type]
    assert (made.server_manager, made.tokenizer, made.processor, made.dataset_cls) == (
        "manager",
        "tokenizer",
        "processor",
        int,
    )
    assert (made.attempt, made.rollout_config) == (1, RolloutConfig())


def test_the_chat_template_ends_where_the_model_begins() -> None:
    """The generation prompt is part of it; ids are Python ints."""
    made = loop()
    ids = asyncio.run(made.apply_chat_template(MESSAGES))
    assert {type(i) for i in ids} == {int}
    assert made.tokenizer.decode(ids) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"


def test_template_options_are_the_same_on_every_call_and_kwargs_win() -> None:
    """`rollout.apply_chat_template_kwargs`."""

    async def main() -> list[str]:
        made = loop(apply_chat_template_kwargs={"shout": True, "add_generation_prompt": False})
        calls = [made.apply_chat_template(MESSAGES), made.apply_chat_template(MESSAGES, shout=False)]
        return [made.tokenizer.decode(await call)[-3:] for call in calls]

    assert asyncio.run(main()) == [">\n!", "|>\n"]


def test_an_answer_is_continued_with_what_its_turn_lacks() -> None:
    """The newline behind the stop token (pitfall C3), the reply, the next header; with the options of every call."""
    made = loop(apply_chat_template_kwargs={"shout": True})
    answer = np.array([72, made.tokenizer.eos_token_id], np.int32)
    ids = asyncio.run(made.continue_chat(answer, [{"role": "tool", "content": "42"}]))
    assert made.tokenizer.decode(ids) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n!"


def test_messages_are_rendered_amid_a_conversation() -> None:
    """verl's `remove_system_prompt`: nothing in front of them."""
    made = loop()
    made.tokenizer.chat_template = "Be brief.\n" + made.tokenizer.chat_template
    whole, part = (asyncio.run(made.apply_chat_template(MESSAGES, remove_system_prompt=flag)) for flag in (False, True))
    assert made.tokenizer.decode(part) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert made.tokenizer.decode(whole) == "Be brief.\n" + made.tokenizer.decode(part)


def test_errors_of_templates_name_the_model() -> None:
    """By `model.path`."""
    made = Loop(TrainerConfig(RolloutConfig(), None, "org/model"), None, tiny_tokenizer())  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match=r"chat template of org/model \(roles: user\): it takes no tools"):
        asyncio.run(made.apply_chat_template(MESSAGES, tools=[{"type": "function"}]))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_images_and_videos_need_their_parts(kind: str) -> None:
    """One content part each: the template writes the placeholders. Said before anything is rendered."""
    parts = [{"type": kind}, {"type": "text", "text": "?"}, {"type": f"{kind}_url"}]
    messages = [{"role": "user", "content": parts}, *MESSAGES]
    for media, said in (([b""], messages), ([b"", b"", b""], messages), ([b""], MESSAGES)):
        with pytest.raises(TemplateError, match=f"{len(media)} {kind}s for messages with [02] content parts"):
            asyncio.run(loop(processor=object()).apply_chat_template(said, **{f"{kind}s": media}))
    check_media(messages, kind, [b"", b""])
    check_media(messages, kind, None)


@pytest.mark.parametrize("kind", ["image", "image_url", "video"])
def test_a_model_without_eyes_takes_no_images(kind: str) -> None:
    """Said before the template, which would complain about its own code."""
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}]
    with pytest.raises(InvalidRequest, match="this model takes none"):
        asyncio.run(loop().apply_chat_template(messages))
    with pytest.raises(InvalidRequest, match="this model takes none"):
        asyncio.run(loop().continue_chat([1], messages))


@pytest.mark.parametrize("call", ["apply_chat_template", "continue_chat"])
def test_a_long_tokenization_leaves_the_event_loop_free(call: str) -> None:
    """It ends only when the loop has gone on meanwhile (pitfall F6)."""

    async def main() -> None:
        made, went_on = loop(), threading.Event()
        render = made.tokenizer.apply_chat_template

        def slow(*args: Any, **kwargs: Any) -> Any:
            assert went_on.wait(30)
            return render(*args, **kwargs)

        made.tokenizer.apply_chat_template = slow
        args = ([1], MESSAGES) if call == "continue_chat" else (MESSAGES,)
        task = asyncio.create_task(getattr(made, call)(*args))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        went_on.set()
        assert await task

    asyncio.run(main())


def test_the_tokenizer_runs_in_its_own_thread() -> None:
    """One thread for all loops, and never the event loop's (pitfall F6)."""

    async def main() -> set[str]:
        jobs = (loop().in_tokenizer_thread(lambda: threading.current_thread().name) for _ in range(5))
        return set(await asyncio.gather(*jobs))

    (name,) = asyncio.run(main())
    assert name.startswith("tokenizer")


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2], np.int32)], ids=type)
def test_decoding_takes_lists_and_arrays(ids: Any) -> None:
    """Without special tokens."""
    made = loop()
    end = made.tokenizer.eos_token_id
    assert asyncio.run(made.decode([*ids, end] if isinstance(ids, list) else np.append(ids, end))) == '"#'


@pytest.mark.parametrize("length", [0, 3, 4])
def test_a_prompt_that_fits_is_kept(length: int) -> None:
    """Also exactly; as int32."""
    ids = loop(prompt_length=4).fit_prompt(list(range(length)))
    assert (ids.dtype, ids.tolist()) == (np.int32, list(range(length)))


def test_a_prompt_too_long_fails_its_row() -> None:
    """The default; both numbers and the key are named."""
    with pytest.raises(PromptTooLong, match=r"prompt of 5 tokens exceeds rollout.prompt_length=4"):
        loop(prompt_length=4).fit_prompt([1, 2, 3, 4, 5])


def test_a_prompt_too_long_loses_its_head_if_so_configured(caplog: pytest.LogCaptureFixture) -> None:
    """With a warning that names the row (pitfall D12)."""
    made = loop(prompt_length=4, prompt_overflow="left")
    made.row_name = "row 7"
    with caplog.at_level(logging.WARNING):
        assert made.fit_prompt([1, 2, 3, 4, 5, 6]).tolist() == [3, 4, 5, 6]
    assert "row 7: prompt of 6 tokens lost its first 2" in caplog.text


@pytest.mark.parametrize(
    ("params", "prompt", "response", "budget"),
    [
        ({}, 10, 0, 100),
        ({}, 10, 40, 60),
        ({"max_new_tokens": 7}, 10, 0, 7),
        ({"max_tokens": 8}, 10, 0, 8),
        ({"max_tokens": 9, "max_new_tokens": 5}, 10, 0, 5),
        ({"max_new_tokens": None}, 10, 0, 100),
        ({"max_new_tokens": 50}, 10, 60, 40),
        ({}, 450, 0, 500 - 8 - 450),
        ({}, 492, 0, 0),
        ({}, 499, 0, -7),
        ({}, 10, 100, 0),
        ({"max_new_tokens": 0}, 10, 0, 0),
    ],
)
def test_the_budget_is_the_smallest_limit(params: dict[str, Any], prompt: int, response: int, budget: int) -> None:
    """The caller's, what the response leaves, what the context leaves (pitfalls D2, D3, D5)."""
    assert loop(context=500, response_length=100).token_budget(prompt, response, params) == budget


def test_an_unknown_context_limits_nothing() -> None:
    """A hub id not on disk: the engine refuses what is too long."""
    assert loop(context=None, response_length=100).token_budget(10**6, 0, {}) == 100


def test_a_budget_is_written_into_a_copy() -> None:
    """The caller's dict stays as it is (pitfall D4)."""
    params = {"max_tokens": 9, "max_new_tokens": 50, "top_k": 3}
    assert with_budget(params, 5) == {"max_new_tokens": 5, "top_k": 3}
    assert params == {"max_tokens": 9, "max_new_tokens": 50, "top_k": 3}
