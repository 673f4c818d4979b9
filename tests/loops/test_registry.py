"""Loops are found by registered name, by file entry and by dotted path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zagent.errors import ConfigError, UnknownAgent
from zagent.loops import registry
from zagent.loops.registry import build_loop, find_loop, register, register_file
from zagent.loops.single_turn import SingleTurnAgentLoop


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered here are forgotten afterwards."""
    find_loop("single_turn_agent")  # registers itself once per process, when it is imported
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


MODULE = """
class Few:
    def __init__(self, server_manager, style="plain"):
        self.server_manager, self.style = server_manager, style

class Any:
    def __init__(self, **kwargs):
        self.kwargs = kwargs

class Tool:
    def __init__(self, limit):
        self.limit = limit

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's module `mine`, importable."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken_mine.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("mine", "broken_mine"):
        sys.modules.pop(name, None)


def test_the_built_in_loop_is_known() -> None:
    """Without anybody importing it."""
    assert find_loop("single_turn_agent") is SingleTurnAgentLoop


def test_a_registered_name_is_found_and_a_later_one_wins() -> None:
    """`register` returns the class unchanged."""

    class First:
        pass

    class Second:
        pass

    assert register("mine")(First) is First
    assert find_loop("mine") is First
    register("mine")(Second)
    assert find_loop("mine") is Second


def test_an_unknown_name_lists_the_known_ones() -> None:
    """And says where one's own loop belongs."""
    register("another")(object)
    with pytest.raises(
        UnknownAgent, match=r"no agent loop 'nobody'; known: another, .*single_turn_agent.*rollout\.imports"
    ):
        find_loop("nobody")


def test_a_dotted_path_is_a_name_too(module: Path) -> None:
    """No registration needed."""
    assert find_loop("mine.Few").__name__ == "Few"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mine.Nobody", "cannot be imported"),
        ("nowhere.at.all", "cannot be imported"),
        ("broken_mine.Loop", "no_such_module_anywhere"),
        ("mine.number", "is a int, neither class nor function"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_says_why(path: str, text: str, module: Path) -> None:
    """As `UnknownAgent`, with the reason."""
    with pytest.raises(UnknownAgent, match=text):
        find_loop(path)


def test_a_constructor_gets_only_the_keywords_it_takes(module: Path) -> None:
    """All of them with `**kwargs`."""
    keywords = {"server_manager": "sm", "tokenizer": "t", "processor": None}
    assert build_loop("mine.Few", keywords).server_manager == "sm"
    assert build_loop("mine.Any", keywords).kwargs == keywords


def test_a_file_entry_adds_constructor_arguments(module: Path, tmp_path: Path) -> None:
    """Nested `_target_`s become objects, as with Hydra's instantiate."""
    path = tmp_path / "loops.yaml"
    path.write_text(
        "- name: styled\n  _target_: mine.Few\n  style: fancy\n"
        "- name: tooled\n  _target_: mine.Any\n  tool: {_target_: mine.Tool, limit: 3}\n  list: [1, {a: b}]\n"
    )
    register_file(path)
    styled = build_loop("styled", {"server_manager": "sm", "tokenizer": "t"})
    assert (styled.server_manager, styled.style) == ("sm", "fancy")
    tooled = build_loop("tooled", {"tokenizer": "t"})
    assert tooled.kwargs["tool"].limit == 3
    assert tooled.kwargs["list"] == [1, {"a": "b"}]
    assert type(tooled.kwargs["list"]) is list
    assert tooled.kwargs["tokenizer"] == "t"


def test_each_row_gets_its_own_instance(module: Path, tmp_path: Path) -> None:
    """State of one trajectory never reaches another."""
    path = tmp_path / "loops.yaml"
    path.write_text("- {name: mine, _target_: mine.Few}\n")
    register_file(path)
    assert build_loop("mine", {"server_manager": 1}) is not build_loop("mine", {"server_manager": 1})


BAD_FILES = {
    "no list": ("name: x\n_target_: y.Z\n", "must be a list"),
    "no target": ("- {name: x}\n", "entry 0 needs name and _target_"),
    "no name": ("- {name: a, _target_: mine.Few}\n- {_target_: mine.Few}\n", "entry 1 needs name and _target_"),
    "no map": ("- just text\n", "entry 0 must be a mapping"),
    "no yaml": ("- [1\n", "cannot be read"),
    "text": ("just text", "loops.yaml"),
    "empty": ("", "must be a list"),
    "interpolation": ("- {name: x, _target_: '${nowhere}'}\n", "cannot be read|needs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_broken_file_is_a_config_error_that_names_it(name: str, tmp_path: Path, module: Path) -> None:
    """Never YAML's or Hydra's own class."""
    text, expected = BAD_FILES[name]
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        register_file(path)
    assert "loops.yaml" in str(caught.value)
    assert "None" not in str(caught.value)


def test_a_missing_file_is_named_with_its_key(tmp_path: Path) -> None:
    """And the system's reason."""
    with pytest.raises(ConfigError, match=r"rollout\.agent_loop_config_path.*No such file"):
        register_file(tmp_path / "nowhere.yaml")


def test_accepted_looks_through_partials() -> None:
    """What a partial has bound already may still be given."""
    from functools import partial

    def factory(tokenizer: Any, style: Any) -> None: ...

    assert registry.accepted(partial(factory, style=1), {"tokenizer": 2, "processor": 3}) == {"tokenizer": 2}
