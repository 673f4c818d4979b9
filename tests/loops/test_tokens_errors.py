"""Templates that cannot do what is asked say so: which, with which roles, and why."""

from __future__ import annotations

from typing import Any

import pytest

from loops.templates.families import FAMILIES, TOOLS, make_tokenizer, result, tokenizer_of
from zagent.errors import TemplateError
from zagent.loops.tokens import ChatTemplate

ASK = [{"role": "user", "content": "Hello?"}]
REPLY = [{"role": "user", "content": "Why?"}]
LATE = [{"role": "system", "content": "Be brief."}]
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(jinja: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(jinja, "<|im_end|>", ["<|im_start|>"], name="some/model"))


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


NOT_APPEND_ONLY = {
    "a counter in front": "{{ messages | length }} messages\n" + each(TURN + "<|im_end|>\n") + END,
    "a counter at each answer": each(
        "<|im_start|>{{ m.role }} {{ loop.index }} of {{ loop.length }}\n{{ m.content }}<|im_end|>\n"
    )
    + END,
    "the last message is marked": each(TURN + "{{ ' (last)' if loop.last }}<|im_end|>\n") + END,
    "a late message moves to the front": "{{ messages[-1].content }}\n" + each(TURN + "<|im_end|>\n") + END,
    "terminators count down": each(TURN + "<|im_end|>{{ loop.revindex }}\n") + END,
}


@pytest.mark.parametrize("jinja", NOT_APPEND_ONLY.values(), ids=NOT_APPEND_ONLY)
@pytest.mark.parametrize("new", [REPLY, [result("42", 17)]], ids=["user", "tool"])
def test_a_template_that_rewrites_what_it_wrote_is_refused(jinja: str, new: list[dict[str, Any]]) -> None:
    """Never a silent wrong cut (pitfall C4): the error quotes what changes."""
    with pytest.raises(
        TemplateError, match=r"some/model \(roles: user, assistant, .*\): it is not append-only: '"
    ) as raised:
        template(jinja).continuation([1], new)
    assert f"when a message of role {new[0]['role']} follows" in str(raised.value)


def test_a_template_that_forgets_earlier_turns_is_refused() -> None:
    """A window of the last messages."""
    jinja = "{% for m in messages[-1:] %}" + TURN + "<|im_end|>\n{% endfor %}" + END
    with pytest.raises(TemplateError, match=r"some/model .*: it drops the text of earlier messages"):
        template(jinja).continuation([1], REPLY)


def test_a_turn_that_ends_by_what_is_said_next_is_refused() -> None:
    """Found out with the contents themselves."""
    told = "{% set next = messages[loop.index0 + 1] %}{{ '!' if next and 'Why' in next.content }}<|im_end|>\n"
    own = template(each(TURN + told) + END)
    assert own.continuation([1], [{"role": "user", "content": "How?"}])
    with pytest.raises(TemplateError, match=r"is not append-only: '<\|im_end\|>"):
        own.continuation([1], REPLY)
    assert own.continuation([1], [{"role": "user", "content": "How?"}])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.takes_tools])
def test_a_template_without_tools_says_so(name: str) -> None:
    """Rendering with and without is the same; the error names the way out."""
    content = [{"type": "text", "text": "Hello?"}] if FAMILIES[name].parts else "Hello?"
    own, key = ChatTemplate(tokenizer_of(name)), "rollout.multi_turn.tools_in_template=false"
    with pytest.raises(TemplateError, match=rf"{name} \(roles: user\): it takes no tools; {key}"):
        own.prompt([{"role": "user", "content": content}], TOOLS)
    assert own.prompt([{"role": "user", "content": content}], [])


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("gemma3", [*ASK, *ASK], r"gemma3 \(roles: user, user\): it refused: Conversation roles must alternate"),
        ("gemma3", [*ASK, *LATE, *LATE], r"gemma3 \(roles: user, system, system\): it refused: Conversation roles"),
        ("command_r", [{"role": "assistant", "content": "x"}], r"command_r \(roles: assistant\): it refused: Conv"),
        ("phi4_mini", [*ASK, *LATE], r"phi4_mini \(roles: user, system\): it drops the text of role system"),
        ("vicuna", [*ASK, result("42", 17)], r"vicuna \(roles: user, tool\): it drops the text of role tool"),
        ("mistral_v3", LATE, r"mistral_v3 \(roles: system\): it drops the text of role system"),
        ("smollm2", [{"role": "user"}], r"smollm2 \(roles: user\): it refused: .* has no attribute 'content'"),
        ("qwen2_5", [], r"qwen2_5 \(roles: \): it refused: Cannot apply chat template to an empty conversation"),
        ("idefics3", ASK, r"idefics3 \(roles: user\): it drops the text of role user"),
    ],
)
def test_a_prompt_that_the_template_does_not_take(name: str, messages: list[dict[str, Any]], reason: str) -> None:
    """Refused in its own words, or silently dropped (pitfall C7: system messages alone or late)."""
    with pytest.raises(TemplateError, match=f"chat template of {reason}"):
        ChatTemplate(tokenizer_of(name)).prompt(messages)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3", "it refused: Conversation roles must alternate"),
        ("phi4_mini", "it drops the text of role system"),
        ("deepseek_v3", "it is not append-only: "),
    ],
)
def test_a_late_system_message_that_is_not_taken(name: str, reason: str) -> None:
    """Refused, dropped, or moved to the front."""
    with pytest.raises(TemplateError, match=rf"{name} \(roles: user, assistant, system\): {reason}"):
        ChatTemplate(tokenizer_of(name)).continuation([1], LATE)


def test_a_tool_result_that_is_not_taken_either_way() -> None:
    """The template's own words about it."""
    with pytest.raises(TemplateError, match=r"gemma3 \(roles: user, assistant, tool, user\): it refused: Conversation"):
        ChatTemplate(tokenizer_of("gemma3")).continuation([1], [result("42", 17), *REPLY])


def test_an_error_leaves_nothing_behind() -> None:
    """The same template goes on working, with the same tokens (pitfall C7)."""
    used, fresh = ChatTemplate(tokenizer_of("phi4_mini")), ChatTemplate(tokenizer_of("phi4_mini"))
    for _ in range(2):
        with pytest.raises(TemplateError):
            used.continuation([1], LATE)
        with pytest.raises(TemplateError):
            used.prompt([*ASK, *LATE])
    assert used.prompt(ASK, TOOLS) == fresh.prompt(ASK, TOOLS)
    assert used.continuation([1], REPLY, TOOLS) == fresh.continuation([1], REPLY, TOOLS)


def test_there_must_be_something_to_append() -> None:
    """No message, no turn."""
    with pytest.raises(TemplateError, match="there is no message to append"):
        ChatTemplate(tokenizer_of("smollm2")).continuation([1], [])


def test_a_tokenizer_without_a_template() -> None:
    """Named, with what transformers says."""
    tokenizer = make_tokenizer("", "<|im_end|>", name="base/model")
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"chat template of base/model .*chat_template is not set"):
        ChatTemplate(tokenizer).prompt(ASK)


def test_text_that_grows_together_with_the_stop_token() -> None:
    """A special token made of the terminator and the text behind it: no border to append at."""
    tokenizer = make_tokenizer(FAMILIES["vicuna"].template, "</s>", ["</s>USER"], bos="<s>", name="odd/model")
    with pytest.raises(TemplateError, match=r"odd/model: 'USER: Why.*cannot be continued token by token"):
        ChatTemplate(tokenizer).continuation([5, tokenizer.eos_token_id], REPLY)


def test_the_name_is_the_models_path_where_one_is_given() -> None:
    """Else the tokenizer's."""
    with pytest.raises(TemplateError, match=r"chat template of my/path \("):
        ChatTemplate(tokenizer_of("gemma3"), name="my/path").prompt([*ASK, *ASK])
