"""Every family of chat templates: what is built turn by turn equals the full rendering."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops.templates.families import FAMILIES, TOOLS, Family, in_full, result, sampled_calls, tokenizer_of
from zagent.loops.tokens import ChatTemplate

ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
PLAIN = ["What is 17 + 25, and 25 more?", "Let me see.", "42", "And again:", "67", "It is 67."]
Messages = list[dict[str, Any]]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(name), stop_ids=stops_of(FAMILIES[name]))


def stops_of(family: Family) -> set[int]:
    return set(tokenizer_of(family.name).convert_tokens_to_ids([family.eos, *family.stops.split()]))


def tools_of(family: Family) -> Any:
    return TOOLS if family.takes_tools else None


def rendered(family: Family, messages: Messages, tools: Any, **options: Any) -> list[int]:
    """What the tokenizer itself makes of a whole conversation."""
    tokenizer, full = tokenizer_of(family.name), in_full(family, messages)
    return list(tokenizer.apply_chat_template(full, tools=tools, tokenize=True, return_dict=False, **options))


def tool_rounds(family: Family, texts: list[str]) -> Messages:
    """Three answers, two rounds of tools between them."""
    return [
        {"role": "user", "content": texts[0]},
        sampled_calls(family, texts[1], 17),
        result(texts[2], 17),
        sampled_calls(family, texts[3], 42),
        result(texts[4], 42),
        {"role": "assistant", "content": texts[5]},
    ]


def replies(texts: list[str]) -> Messages:
    """Three answers, two replies of the user between them."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def play(family: Family, messages: Messages, tools: Any) -> tuple[list[int], list[int]]:
    """Build ``messages`` turn by turn, each answer sampled as the full rendering has it: all ids, and the mask of those
    behind the prompt. Each prompt on the way must be the beginning of the full rendering."""
    template, stops = template_of(family.name), stops_of(family)
    full = rendered(family, messages, tools)
    ids = template.prompt(in_full(family, messages[:1]), tools)
    mask: list[int] = []
    for i in range(1, len(messages), 2):
        assert ids == full[: len(ids)], f"answer {i // 2} is asked for with other tokens"
        end = next((place for place in range(len(ids), len(full)) if full[place] in stops), len(full) - 1)
        sampled = full[len(ids) : end + 1]
        assert sampled
        inserted = template.continuation(sampled, messages[i + 1 : i + 2], tools) if i + 1 < len(messages) else []
        ids = [*ids, *sampled, *inserted]
        mask += [1] * len(sampled) + [0] * len(inserted)
    return ids, mask


def equals_full_rendering(family: Family, messages: Messages, tools: Any) -> None:
    ids, mask = play(family, messages, tools)
    full, tokenizer = rendered(family, messages, tools), tokenizer_of(family.name)
    assert ids == full[: len(ids)]
    assert tokenizer.decode(full[len(ids) :]).strip() in {"", tokenizer.eos_token}, "only the last turn's tail is left"
    prompt = template_of(family.name).prompt(in_full(family, messages[:1]), tools)
    assert ids[: len(prompt)] == prompt
    assert len(mask) == len(ids) - len(prompt)


@ALL
def test_three_turns_with_tools_equal_the_full_rendering(family: Family) -> None:
    """Token by token, and each prompt begins with the one before and its answer."""
    equals_full_rendering(family, tool_rounds(family, PLAIN), tools_of(family))


@ALL
def test_three_turns_with_a_user_equal_the_full_rendering(family: Family) -> None:
    """Interactions: replies of a simulated user."""
    equals_full_rendering(family, replies(PLAIN), None)


@ALL
def test_the_mask_counts_exactly_the_sampled_tokens(family: Family) -> None:
    """Three answers, in the order in which they were sampled; results and headers are not among them."""
    messages = tool_rounds(family, PLAIN)
    ids, mask = play(family, messages, tools_of(family))
    behind = ids[len(ids) - len(mask) :]
    said = tokenizer_of(family.name).decode([token for token, sampled in zip(behind, mask, strict=True) if sampled])
    heard = tokenizer_of(family.name).decode(
        [token for token, sampled in zip(behind, mask, strict=True) if not sampled]
    )
    assert said.count("25") == 2
    assert said.index("17") < said.index("42") < said.index("It is 67.")
    assert ("42" in heard, "67" in heard, "It is" in heard) == (True, True, False)
    assert "".join(map(str, mask)).count("01") == 2


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [" x ", "\n", "\nuser\n", '"', "'", "}\n", "\\n", "  ", "\ufeff", "é", "👩‍💻", "</tool_call", "a\r\n\tb", "{{ 1 }}"]
)
#: Begins with what no merge joins to the generation prompt: where an answer begins is the model's business.
ANSWER = TEXT.map("~{}".format)


@ALL
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_contents_equal_the_full_rendering(family: Family, data: st.DataObject) -> None:
    """Unicode, quotes, line breaks, spaces at either end, empty results."""
    texts = [data.draw(ANSWER if i in (1, 3, 5) else TEXT) for i in range(6)]
    equals_full_rendering(family, tool_rounds(family, texts), tools_of(family))
    equals_full_rendering(family, replies(texts), None)


@ALL
@pytest.mark.parametrize("kind", ["tool", "user"])
def test_an_answer_without_its_terminator_is_closed(family: Family, kind: str) -> None:
    """Cut off by length or a stop string: the terminator is inserted, and the same tokens follow."""
    template, tools = template_of(family.name), tools_of(family)
    sampled, new = answer_and_next(family, kind)
    assert template.continuation(sampled[:-1], new, tools) == [sampled[-1], *template.continuation(sampled, new, tools)]


def answer_and_next(family: Family, kind: str) -> tuple[list[int], Messages]:
    """The first answer as the full rendering has it, up to its stop token, and what follows it."""
    messages = tool_rounds(family, PLAIN) if kind == "tool" else replies(PLAIN)
    full = rendered(family, messages, tools_of(family) if kind == "tool" else None)
    start = len(
        template_of(family.name).prompt(in_full(family, messages[:1]), tools_of(family) if kind == "tool" else None)
    )
    end = next(place for place in range(start, len(full)) if full[place] in stops_of(family))
    return full[start : end + 1], messages[2:3]


@ALL
@pytest.mark.parametrize("kind", ["tool", "user"])
def test_another_eos_stands_for_the_terminator(family: Family, kind: str) -> None:
    """The turn is not ended twice: `<|eom_id|>`, `<|endoftext|>`, whatever the model's configuration names. A header
    that has not been sampled (GLM-4) is still written."""
    template, tools = template_of(family.name), tools_of(family)
    sampled, new = answer_and_next(family, kind)
    wanted = template.continuation(sampled, new, tools)
    header = [sampled[-1]] if family.name == "glm4" else []
    for other in stops_of(family) - {sampled[-1]}:
        assert template.continuation([*sampled[:-1], other], new, tools) == header + wanted


@ALL
def test_the_prompt_is_the_tokenizers_own(family: Family) -> None:
    """The beginning-of-text token is there once."""
    tokenizer, messages = tokenizer_of(family.name), in_full(family, replies(PLAIN[:1]))
    ids = template_of(family.name).prompt(messages, tools_of(family))
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    assert ids == list(tokenizer.apply_chat_template(messages, tools=tools_of(family), **options))
    assert ids.count(tokenizer.bos_token_id) == (family.bos is not None)


@ALL
def test_a_fragment_is_the_new_messages_alone(family: Family) -> None:
    """No system prompt, no beginning of text, nothing of the answer before; the generation prompt is there."""
    template, tokenizer = template_of(family.name), tokenizer_of(family.name)
    sampled, new = answer_and_next(family, "user")
    fragment = tokenizer.decode(template.fragment(new))
    inserted = tokenizer.decode(template.continuation(sampled[:-1], new))
    assert inserted.endswith(fragment)
    assert inserted.removesuffix(fragment).strip() in {"", tokenizer.decode(sampled[-1:])}
    assert PLAIN[2] in fragment
    assert not fragment[0].isspace(), "the end of the turn before"
    assert not {"made for tests", "system"} & set(fragment.split("\n"))


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "deepseek_v3", "glm4", "kimi_k2", "hermes3", "mistral_v3", "phi4_mini"]
)
def test_results_of_one_round_go_together(name: str) -> None:
    """Two parallel calls: their results are rendered as in the full conversation, in order."""
    family = FAMILIES[name]
    both = sampled_calls(family, "Both:", 17)
    both["tool_calls"] += sampled_calls(family, "", 42)["tool_calls"]
    messages = [replies(PLAIN)[0], both, result("42", 17), result("67", 42), {"role": "assistant", "content": "Done."}]
    full, stops = rendered(family, messages, tools_of(family)), stops_of(family)
    prompt = template_of(name).prompt(messages[:1], tools_of(family))
    end = next(place for place in range(len(prompt), len(full)) if full[place] in stops)
    ids = [
        *full[: end + 1],
        *template_of(name).continuation(full[len(prompt) : end + 1], messages[2:4], tools_of(family)),
    ]
    assert ids == full[: len(ids)]
    assert "67" in tokenizer_of(name).decode(ids[end:])
