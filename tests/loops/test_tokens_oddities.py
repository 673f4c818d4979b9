"""Oddities of single templates and tokenizers, one by one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loops.templates.families import FAMILIES, TOOLS, make_tokenizer, result, sampled_calls, tokenizer_of
from zagent.loops.tokens import ChatTemplate, stop_token_ids

ASK = [{"role": "user", "content": "Hello?"}]
REPLY = [{"role": "user", "content": "Why?"}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(name: str, ids: list[int]) -> str:
    return str(tokenizer_of(name).decode(ids))


def sampled(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def test_reasoning_stays_in_the_history() -> None:
    """A template that strips earlier reasoning never sees it again: what was sampled is what the next call is sent
    (pitfall C9)."""
    template = ChatTemplate(tokenizer_of("qwen3"))
    answer = sampled("qwen3", "<think>\nhm\n</think>\n\nHi!<|im_end|>")
    ids = template.prompt(ASK) + answer + template.continuation(answer, REPLY)
    assert text_of("qwen3", ids) == (
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nHi!<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "options", "header"),
    [
        ("qwen3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3", {}, "<|im_start|>assistant\n"),
        ("deepseek_v3", {"thinking": True}, "<｜Assistant｜><think>\n"),
        ("smollm2", {"add_generation_prompt": False}, "<|im_end|>\n"),
    ],
)
def test_options_are_given_on_every_turn(name: str, options: dict[str, Any], header: str) -> None:
    """`rollout.apply_chat_template_kwargs`: the next answer is asked for like the first."""
    template = ChatTemplate(tokenizer_of(name), options)
    answer = sampled(name, "Hi!" + FAMILIES[name].eos)
    for ids in (template.prompt(ASK), template.continuation(answer, REPLY), template.fragment(REPLY)):
        assert text_of(name, ids).endswith(header)


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2", "kimi_k2", "gpt_oss"])
def test_a_system_prompt_of_the_template_is_there_once(name: str) -> None:
    """In the first prompt only."""
    template = ChatTemplate(tokenizer_of(name))
    answer = sampled(name, "Hi!" + FAMILIES[name].eos)
    assert text_of(name, template.prompt(ASK)).count("made for tests") == 1
    assert "made for tests" not in text_of(name, template.continuation(answer, REPLY))
    assert "made for tests" not in text_of(name, template.fragment(REPLY))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tool_role])
def test_a_tool_role_is_used_where_there_is_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the template demands of the calls before."""
    with caplog.at_level(logging.WARNING):
        ChatTemplate(tokenizer_of(name)).fragment([result("42", 17)])
    assert not caplog.records


@pytest.mark.parametrize("name", ["gemma3", "command_r", "vicuna"])
def test_without_a_tool_role_results_are_one_user_message(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused or silently dropped: two results and roles that must alternate. A warning says so, once."""
    template = ChatTemplate(tokenizer_of(name))
    with caplog.at_level(logging.WARNING):
        texts = [text_of(name, template.fragment([result(one, 17), result("67", 42)])) for one in ("42", "43")]
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n67\n</tool_response>" in texts[0]
    assert texts[1] == texts[0].replace("42", "43")
    assert [record.message for record in caplog.records if "tool results go as user messages" in record.message]
    assert len(caplog.records) == 1


def test_an_empty_result_is_not_taken_for_a_tool_role() -> None:
    """That a template shows nothing of an empty message does not mean that it shows messages of its role."""
    text = text_of("vicuna", ChatTemplate(tokenizer_of("vicuna")).fragment([result("", 17)]))
    assert text == "USER: <tool_response>\n\n</tool_response> ASSISTANT:"


@pytest.mark.parametrize("call_id", ["call_1", "", None, "a-b-c-d-e", "much_longer_than_nine"])
def test_mistral_gets_ids_of_nine_letters_or_digits(call_id: str | None) -> None:
    """Ids that the parser made up become such ones; one result, one id."""
    message = {"role": "tool", "tool_call_id": call_id, "content": "42"}
    message = {key: value for key, value in message.items() if value is not None}
    text = text_of("mistral_v3", ChatTemplate(tokenizer_of("mistral_v3")).fragment([message]))
    payload = json.loads(text.removeprefix("[TOOL_RESULTS] ").removesuffix("[/TOOL_RESULTS]"))
    assert payload["content"] == 42
    assert len(payload["call_id"]) == 9
    assert payload["call_id"].isalnum() or call_id == "a-b-c-d-e"


def test_results_of_calls_that_the_template_cannot_write_keep_their_role() -> None:
    """Llama 3.1 takes one call a turn, and results of two."""
    text = text_of("llama3_1", ChatTemplate(tokenizer_of("llama3_1")).fragment([result("42", 17), result("67", 42)]))
    assert text.count("<|start_header_id|>ipython") == 2


def test_arguments_may_have_to_be_text() -> None:
    """And a call may have to stand before its result."""
    called = "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    checked = (
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('?') }}{% endif %}"
    )
    start, end = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}", "<|im_end|>\n{% endfor %}"
    tokenizer = make_tokenizer(start + called + checked + end, "<|im_end|>", ["<|im_start|>"])
    ids = ChatTemplate(tokenizer).continuation([1], [result("42", 17)])
    assert tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"


def test_an_answer_in_the_prompt_may_lose_its_text() -> None:
    """Templates write calls without the text beside them, and answers without their reasoning."""
    history = [*ASK, sampled_calls(FAMILIES["qwen3"], "Let me see.", 17), result("42", 17)]
    text = text_of("llama3_1", ChatTemplate(tokenizer_of("llama3_1")).prompt(history))
    assert "Let me see." not in text
    assert '{"name": "add", "parameters": {"a": 17' in text


def test_no_tools_are_no_tools() -> None:
    """An empty list is as good as None."""
    template = ChatTemplate(tokenizer_of("llama3_1"))
    assert template.prompt(ASK, []) == template.prompt(ASK)


def test_mistral_writes_the_ids_of_calls_anew() -> None:
    """What is found out about one call is not taken for the next one's, whose id differs."""
    template = ChatTemplate(tokenizer_of("mistral_v3"))
    texts = [text_of("mistral_v3", template.fragment([result("42", number)])) for number in (1, 2, 1)]
    assert ["call00001" in texts[0], "call00002" in texts[1], texts[2] == texts[0]] == [True] * 3


def test_mistral_shows_its_tools_with_each_user_message() -> None:
    """They stand beside the last one, and what was sent before cannot be taken back; results come without."""
    template = ChatTemplate(tokenizer_of("mistral_v3"))
    assert text_of("mistral_v3", template.fragment(REPLY, TOOLS)).startswith("[AVAILABLE_TOOLS] [")
    assert text_of("mistral_v3", template.fragment([result("42", 17)], TOOLS)).startswith("[TOOL_RESULTS] {")


def test_glm_samples_the_next_header() -> None:
    """It is not inserted a second time; a header of another role is inserted as it should be."""
    template = ChatTemplate(tokenizer_of("glm4"), stop_ids=sampled("glm4", "<|user|><|observation|><|endoftext|>"))
    header, body = "<|observation|>", "\n<tool_response>\n42\n</tool_response><|assistant|>"
    new = [result("42", 17)]
    assert text_of("glm4", template.continuation(sampled("glm4", "x<|observation|>"), new)) == body
    assert text_of("glm4", template.continuation(sampled("glm4", "x"), new)) == header + body
    assert text_of("glm4", template.continuation(sampled("glm4", "x<|user|>"), new)) == header + body


def test_a_special_token_that_ends_no_answer_closes_nothing() -> None:
    """Cut off by length right behind `</tool_call>`: the turn is closed."""
    template = ChatTemplate(tokenizer_of("qwen2_5"))
    text = text_of("qwen2_5", template.continuation(sampled("qwen2_5", "<tool_call>x</tool_call>"), REPLY))
    assert text.startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("answer", [[], np.empty(0, np.int32), np.array([5], np.int32)], ids=["list", "empty", "array"])
def test_answers_are_lists_or_arrays_and_may_be_empty(answer: Any) -> None:
    """The turn is closed; ids are Python ints."""
    ids = ChatTemplate(tokenizer_of("smollm2")).continuation(answer, REPLY)
    assert {type(token) for token in ids} == {int}
    assert text_of("smollm2", ids).startswith("<|im_end|>\n<|im_start|>user\nWhy?")


def test_half_of_two_closing_tokens_is_completed() -> None:
    """Cut off by length between them."""
    template = ChatTemplate(tokenizer_of("command_r"))
    closing = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    rest = text_of("command_r", template.fragment(REPLY))
    for k, there in enumerate(["x", "x<|END_RESPONSE|>", "x" + closing]):
        lacking = "".join(["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"][k:])
        assert text_of("command_r", template.continuation(sampled("command_r", there), REPLY)) == lacking + rest


def test_a_call_and_an_answer_may_end_differently() -> None:
    """gpt-oss: `<|call|>` ends a call, `<|end|>` an answer, `<|return|>` the model's answer."""
    template = ChatTemplate(tokenizer_of("gpt_oss"), stop_ids=sampled("gpt_oss", "<|call|><|end|><|return|>"))
    for new, own in ((([result("42", 17)]), "<|call|>"), (REPLY, "<|end|>")):
        rest = text_of("gpt_oss", template.fragment(new))
        texts = [
            text_of("gpt_oss", template.continuation(sampled("gpt_oss", "x" + end), new))
            for end in ("<|call|>", "<|end|>", "<|return|>")
        ]
        assert texts == [rest] * 3
        assert text_of("gpt_oss", template.continuation(sampled("gpt_oss", "x"), new)) == own + rest


def test_what_contents_say_is_not_mistaken_for_the_dummy() -> None:
    """Contents that have the dummy's own words."""
    words = [{"role": "user", "content": "zagentanswer zagentanswerx zagentuser zagentprobe0000"}]
    text = text_of("smollm2", ChatTemplate(tokenizer_of("smollm2")).fragment(words))
    assert text == f"<|im_start|>user\n{words[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_messages_and_tools_are_left_as_they_are() -> None:
    """They belong to the caller."""
    new, tools = [{"role": "tool", "content": "42"}], json.loads(json.dumps(TOOLS))
    ChatTemplate(tokenizer_of("mistral_v3")).fragment(new, tools)
    assert new == [{"role": "tool", "content": "42"}]
    assert tools == TOOLS


def test_results_with_images_keep_their_parts() -> None:
    """Where they go as a user message, the tags are parts beside them."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|im_start|>"
        + (
            "{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
        )
    )
    tokenizer = make_tokenizer(template, "<|im_end|>", ["<|im_start|>", "<image>"])
    content = [{"type": "text", "text": "a cat"}, {"type": "image"}]
    ids = ChatTemplate(tokenizer).fragment([{"role": "tool", "content": content}, result("42", 17)])
    assert tokenizer.decode(ids) == (
        "<|im_start|>user:<tool_response>\na cat<image>\n</tool_response>\n"
        "<tool_response>\n42\n</tool_response><|im_end|>"
    )


def test_text_behind_a_stop_token_has_the_tokens_it_has_there() -> None:
    """A tokenizer that writes the first word of a text with a space (Llama 2): inserted text is not a first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["▁", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template=FAMILIES["vicuna"].template
    )
    messages = [*ASK, {"role": "assistant", "content": "Hi!"}, *REPLY]
    template = ChatTemplate(tokenizer)
    full = template.prompt(messages)
    answer = full[len(template.prompt(ASK)) : full.index(tokenizer.eos_token_id) + 1]
    assert template.prompt(ASK) + answer + template.continuation(answer, REPLY) == full


def test_stop_tokens_come_from_the_models_files(tmp_path: Path) -> None:
    """generation_config.json (a list) and config.json (one), the tokenizer's eos, and `<|eom_id|>` where it exists."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 1}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 8}')
    tokenizer = make_tokenizer(CHATML, "<|im_end|>", ["<|eom_id|>"], name=str(tmp_path))
    own = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eom_id|>"])
    assert stop_token_ids(tokenizer) == {7, 8, 9, *own}
    assert stop_token_ids(make_tokenizer(CHATML, "<|im_end|>", ["<|eom_id|>"]), str(tmp_path)) == {7, 8, 9, *own}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tokenizer) == set(own)


def test_rows_share_what_was_found_out() -> None:
    """One object for the same tokenizer, options and name; another for others."""
    tokenizer = tokenizer_of("qwen3")
    shared = ChatTemplate.of(tokenizer, {"enable_thinking": False}, "m")
    assert ChatTemplate.of(tokenizer, {"enable_thinking": False}, "m") is shared
    others = [
        ChatTemplate.of(tokenizer, {"enable_thinking": True}, "m"),
        ChatTemplate.of(tokenizer, {"enable_thinking": False}, "n"),
        ChatTemplate.of(tokenizer_of("qwen2_5"), {"enable_thinking": False}, "m"),
    ]
    assert shared not in others


def test_a_seam_is_looked_for_once_per_shape() -> None:
    """Later turns cost one rendering."""
    tokenizer, count = make_tokenizer(CHATML, "<|im_end|>", ["<|im_start|>"]), []
    original = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kwargs: count.append(1) or original(*args, **kwargs)
    template = ChatTemplate(tokenizer)
    template.fragment(REPLY)
    first = len(count)
    template.fragment([{"role": "user", "content": "another"}])
    assert len(count) == first + 1
    template.prompt(ASK)
    again = len(count)
    template.prompt([{"role": "user", "content": "another"}])
    assert len(count) == again + 1
