"""The light tokenizer says what transformers says, or leaves it to transformers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops.templates.families import FAMILIES, TOOLS, Family, in_full, tokenizer_of
from loops.test_tokens import PLAIN, tool_rounds
from support.tiny_tokenizer import saved_tokenizer
from zagent.loops.light_tokenizer import LightTokenizer, open_light
from zagent.loops.tokenizer import load_tokenizer, probe

Edit = Callable[[dict[str, Any]], Any]


def not_needed() -> Any:
    raise AssertionError("transformers was asked")


def transformers_at(path: Path | str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(path))


def light_at(path: Path | str) -> LightTokenizer:
    """That never becomes the whole one."""
    found = open_light(str(path), not_needed)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any, Any]:
    """A family, its tokenizer as transformers loads it, and light."""
    family: Family = request.param
    directory = tmp_path_factory.mktemp(family.name)
    tokenizer_of(family.name).save_pretrained(directory)
    return family, transformers_at(directory), light_at(directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    saved_tokenizer(tmp_path)
    return tmp_path


def edited(directory: Path, edit: Edit, name: str = "tokenizer_config.json") -> Path:
    """A file of the tokenizer's with ``edit`` done to it."""
    data = json.loads((directory / name).read_text())
    edit(data)
    (directory / name).write_text(json.dumps(data))
    return directory


def test_a_familys_facts_are_transformers(saved: tuple[Family, Any, Any]) -> None:
    """Special tokens, added tokens, size, template, and the probe that compares processes."""
    _, whole, light = saved
    names = ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token_id", "unk_token", "chat_template")
    for name in (*names, "name_or_path"):
        assert getattr(light, name) == getattr(whole, name)
    assert {i: repr(t) for i, t in light.added_tokens_decoder.items()} == {
        i: repr(t) for i, t in whole.added_tokens_decoder.items()
    }
    assert len(light) == len(whole)
    assert probe(light) == probe(whole)


@pytest.mark.parametrize("prompted", [True, False])
def test_a_familys_conversations_are_transformers(prompted: bool, saved: tuple[Family, Any, Any]) -> None:
    """With tools and without, as text and as ids, also where the template refuses."""
    family, whole, light = saved
    messages = in_full(family, tool_rounds(family, PLAIN))
    for tools in (None, TOOLS):
        options = {"tools": tools, "add_generation_prompt": prompted, "return_dict": False}
        for tokenize in (False, True):
            expected = told(whole, messages, tokenize=tokenize, **options)
            assert told(light, messages, tokenize=tokenize, **options) == expected
    system_only = [{"role": "system", "content": "Hm."}]
    assert told(light, system_only, tokenize=False) == told(whole, system_only, tokenize=False)


def told(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """The conversation, or what the template says against it."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        return type(error), str(error)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text() | st.sampled_from([" ", "<|im_end|>", "<s>", "</s>", "\n\n", "<tool_call>"])).map("".join))
def test_texts_and_ids_are_transformers(saved: tuple[Family, Any, Any], text: str) -> None:
    """Any text there and back, special tokens inside or not."""
    _, whole, light = saved
    for added in (True, False):
        ids = light.encode(text, add_special_tokens=added)
        assert ids == whole.encode(text, add_special_tokens=added)
        for skipped in (True, False):
            expected = whole.decode(ids, skip_special_tokens=skipped)
            assert light.decode(ids, skip_special_tokens=skipped) == expected
            assert light.decode(np.array(ids, np.int32), skip_special_tokens=skipped) == expected


def test_the_built_in_model_is_light() -> None:
    """And equal."""
    path = Path(__file__).parents[2] / "zagent/tiny/final"
    light, whole = light_at(path), transformers_at(path)
    assert probe(light) == probe(whole)
    assert light.decode(258) == whole.decode(258)


@pytest.mark.parametrize(
    "edit",
    [
        lambda config: config.update(clean_up_tokenization_spaces=True),
        lambda config: config.update(split_special_tokens=True),
        lambda config: config.update(unheard_of=1),
        lambda config: config.update(image_token="<|im_end|>"),
        lambda config: config.update(eos_token={"__type": "AddedToken", "content": "<|im_end|>"}),
        lambda config: config.update(unk_token="<not there>"),
        lambda config: config.update(unk_token="a"),
        lambda config: config.update(extra_special_tokens={"image": "<|im_end|>"}),
        lambda config: config.update(extra_special_tokens=["<more>"]),
        lambda config: config.update(chat_template={"default": "x"}),
        lambda config: config.update(padding_side="middle"),
        lambda config: config.update(added_tokens_decoder={"3": {"content": "x"}}),
    ],
)
def test_what_is_not_understood_is_left_to_transformers(edit: Edit, directory: Path) -> None:
    """Every key that could change an id or a text, and every key that is not known."""
    (directory / "chat_template.jinja").rename(directory / "elsewhere")
    assert open_light(str(directory), not_needed) is not None
    assert open_light(str(edited(directory, edit)), not_needed) is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda tokenizer: tokenizer.update(truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0}),
        lambda tokenizer: tokenizer.pop("model"),
        lambda tokenizer: tokenizer["added_tokens"][2].update(special=False),
    ],
)
def test_a_backend_with_more_is_left_to_transformers(edit: Edit, directory: Path) -> None:
    """Truncation of its own, a broken file, a special token that is none."""
    assert open_light(str(edited(directory, edit, "tokenizer.json")), not_needed) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "additional_chat_templates", "chat_template.jinja"])
def test_files_with_more_are_left_to_transformers(name: str, directory: Path) -> None:
    """Older files, templates by name, a template that marks what the model said."""
    (directory / name).write_text("{% generation %}x{% endgeneration %}")
    assert open_light(str(directory), not_needed) is None


def test_without_a_configuration_transformers_decides(directory: Path) -> None:
    """As for everything that is missing."""
    (directory / "tokenizer_config.json").unlink()
    assert open_light(str(directory), not_needed) is None
    assert type(load_tokenizer(str(directory))).__name__ != "LightTokenizer"


@pytest.mark.parametrize(
    "ask",
    [
        lambda tokenizer: tokenizer("Hi", return_attention_mask=True).data,
        lambda tokenizer: tokenizer.batch_decode([[72], [105]]),
        lambda tokenizer: tokenizer.encode("Hi", max_length=1, truncation=True),
        lambda tokenizer: tokenizer.decode([[72], [105]]),
        lambda tokenizer: tokenizer.convert_tokens_to_ids(["H", "<|im_end|>"]),
        lambda tokenizer: tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]).data,
        lambda tokenizer: tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, chat_template="{{ messages[0].content }}"
        ),
        lambda tokenizer: [tokenizer.apply_chat_template([], tokenize=False) for _ in range(0)],
    ],
)
def test_what_is_beyond_it_is_transformers_answer(ask: Callable[[Any], Any], directory: Path) -> None:
    """Users' loops find the tokenizer they know."""
    assert ask(load_tokenizer(str(directory))) == ask(transformers_at(directory))


@pytest.mark.parametrize("mark", ["{%generation%}", "{%- generation -%}", "{%+ generation %}"])
def test_however_a_template_marks_what_the_model_said(mark: str, directory: Path) -> None:
    """It is transformers' business."""
    (directory / "chat_template.jinja").write_text(mark + "x{% endgeneration %}")
    assert open_light(str(directory), not_needed) is None


def test_it_can_be_pickled(directory: Path) -> None:
    """As transformers' can, for pools of processes; after it has rendered, too."""
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    light = load_tokenizer(str(directory))
    light.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    back = pickle.loads(pickle.dumps(light))
    assert isinstance(back, LightTokenizer)
    assert back.encode("Hi") == light.encode("Hi")


def test_a_pair_of_texts_is_transformers_answer(directory: Path) -> None:
    """Given by position, as there."""
    assert load_tokenizer(str(directory)).encode("one", "two") == transformers_at(directory).encode("one", "two")


def test_a_changed_tokenizer_is_changed_altogether(directory: Path) -> None:
    """Once it is transformers', it stays transformers': for what was light before, too."""
    tokenizer = load_tokenizer(str(directory))
    before = len(tokenizer)
    assert tokenizer.encode("<new>") != [before]
    tokenizer.add_tokens(["<new>"])
    assert tokenizer.encode("<new>", add_special_tokens=False) == [before]
    assert tokenizer.decode([before]) == "<new>"
    assert len(tokenizer) == before + 1
    assert before in tokenizer.added_tokens_decoder
    tokenizer.chat_template = "changed"
    assert tokenizer.chat_template == "changed"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "changed"


def test_a_copy_is_light_as_well(directory: Path) -> None:
    """Users copy tokenizers to change them."""
    light = light_at(directory)
    assert copy.deepcopy(light).encode("Hi") == light.encode("Hi")
    assert bool(light)
    assert repr(light) == f"LightTokenizer({str(directory)!r})"
    with pytest.raises(AttributeError):
        _ = light.__unheard_of__
