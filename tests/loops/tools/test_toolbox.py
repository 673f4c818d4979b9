"""Tools by name: registered, listed in YAML, by dotted path; built once, and chosen per row."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import zagent
from zagent.config import MultiTurnConfig
from zagent.errors import ConfigError, InputError
from zagent.loops.tools import BaseTool, FunctionTool, Toolbox, function, load
from zagent.loops.tools.load import deadline

SCHEMA = {
    "type": "function",
    "function": {
        "name": "counter",
        "description": "Counts.",
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 1, "enum": [1, 2]},
                "m": {"items": {"anyOf": [{}, True]}},
            },
            "required": ["n"],
        },
    },
}

MODULE = '''
import time, zagent
from zagent import BaseTool, ToolResponse

class Counter(BaseTool):
    built = 0
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        Counter.built += 1
    async def execute(self, instance_id, arguments, **kwargs):
        return ToolResponse(text="1"), 0.0, {}

class Own(BaseTool):
    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}
    async def execute(self, instance_id, arguments, **kwargs):
        return "own", 0.0, {}

class NoSuper(Own):
    def __init__(self, config, tool_schema): pass

class BadSchema(Own):
    def get_openai_tool_schema(self):
        return {"function": {"name": "bad", "parameters": {"type": "strng"}}}

class Broken(Own):
    def __init__(self, config, tool_schema): raise RuntimeError("no index")

class Exits(Own):
    def __init__(self, config, tool_schema): raise SystemExit("bye")

class Hangs(Own):
    """Tries again for ever."""
    def __init__(self, config, tool_schema):
        while True:
            try:
                time.sleep(1000)
            except Exception:
                pass

class Abstract(BaseTool): pass

def plain(a: int) -> int:
    """Plain."""
    return a

instance = Own()
number = 3
'''


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own."""
    monkeypatch.setattr(function, "_REGISTRY", {})
    yield


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of tools that can be imported."""
    name = f"tools_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config(**keys: Any) -> MultiTurnConfig:
    return MultiTurnConfig.model_validate(keys)


def from_yaml(tmp_path: Path, *entries: Any, **keys: Any) -> Toolbox:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return Toolbox.load(config(tool_config_path=str(path), **keys))


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    """It registers it, under its own name or another, with its docstring or another description."""

    @zagent.tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @zagent.tool(name="times", description="Multiply.")
    async def product(a: int, b: int) -> int:
        return a * b

    assert add(1, 2) == 3
    box = Toolbox.load(config())
    assert box.names == ["add", "times"]
    assert [one["function"]["description"] for one in box.schemas] == ["Add.", "Multiply."]


def test_two_functions_of_one_name_are_refused() -> None:
    """A function that is registered again (its module is imported twice) is no second one."""

    def make() -> Any:
        def add(a: int) -> int:
            return a

        return add

    zagent.tool(make())
    zagent.tool(make())
    with pytest.raises(ConfigError, match=r"two tools are called 'add': .*make.*add and .*other"):

        @zagent.tool(name="add")
        def other(a: int) -> int:
            return a

    assert Toolbox.load(config()).names == ["add"]


@pytest.mark.parametrize("thing", [int, 3, BaseTool])
def test_only_functions_are_decorated(thing: Any) -> None:
    """A class is no function."""
    with pytest.raises(ConfigError, match="@tool takes a function"):
        zagent.tool(thing)


def test_tools_are_chosen_by_name_or_dotted_path(module: str) -> None:
    """In the order of the list; a function, a class, an object; nothing that is not listed."""

    @zagent.tool
    def first() -> None: ...

    @zagent.tool
    def second() -> None: ...

    names = ["second", f"{module}.plain", f"{module}.Own"]
    assert Toolbox.load(config(tools=names)).names == ["second", "plain", "own"]
    assert Toolbox.load(config(tools=[f"{module}.instance"])).names == ["own"]
    assert Toolbox.load(config(tools=[])).names == []


def test_a_registered_function_may_be_named_by_its_path() -> None:
    """It keeps the name it was registered under."""
    made = zagent.tool(name="mine")(registered_elsewhere)
    assert function.find_registered(made) is Toolbox.load(config()).get("mine")
    assert load._from_object(made).name == "mine"


def registered_elsewhere(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nope", "rollout.multi_turn.tools: 'nope' is no tool; known: first. A function of your own"),
        ("no.such.thing", "rollout.multi_turn.tools: 'no.such.thing': ModuleNotFoundError: No module named 'no'"),
        ("{module}.nope", "rollout.multi_turn.tools: '{module}.nope': "),
        ("{module}.number", "rollout.multi_turn.tools: '{module}.number': @tool takes a function, got 3"),
        ("{module}.Abstract", "Can't instantiate abstract class Abstract"),
        ("{module}.NoSuper", "NoSuper.__init__ must call super"),
        ("{module}.BadSchema", "tool 'bad': function.parameters must be a JSON Schema of type object"),
        ("{module}.Counter", "Counter has no tool_schema with function.name"),
        ("{module}.Broken", "RuntimeError: no index"),
        ("{module}.Exits", "SystemExit: bye"),
    ],
)
def test_a_tool_that_cannot_be_had_is_named(module: str, name: str, told: str) -> None:
    """With the reason, and the known ones where it is a name."""

    @zagent.tool
    def first() -> None: ...

    name = name.replace("{module}", module)
    with pytest.raises(ConfigError) as caught:
        Toolbox.load(config(tools=[name]))
    assert told.replace("{module}", module) in str(caught.value)
    assert f"rollout.multi_turn.tools: {name!r}" in str(caught.value)


def test_yaml_lists_classes_with_config_and_schema(tmp_path: Path, module: str) -> None:
    """verl's form; every keyword of the schema comes through (pitfall E4), `config.type` is not in the way."""
    entry = {"class_name": f"{module}.Counter", "config": {"type": "native", "limit": 3}, "tool_schema": SCHEMA}
    box = from_yaml(tmp_path, entry, {"class_name": f"{module}.Own", "config": {}})
    assert box.names == ["counter", "own"]
    assert box.schemas[0] == SCHEMA
    assert box.get("counter").config["limit"] == 3  # type: ignore[union-attr]


def test_yaml_and_functions_are_offered_together(tmp_path: Path, module: str) -> None:
    """And chosen from by name."""

    @zagent.tool
    def first() -> None: ...

    entry = {"class_name": f"{module}.Own"}
    assert from_yaml(tmp_path, entry).names == ["own", "first"]
    assert from_yaml(tmp_path, entry, tools=["own"]).names == ["own"]


def test_two_entries_of_one_name_are_refused(tmp_path: Path, module: str) -> None:
    """Which one would be meant?"""
    entry = {"class_name": f"{module}.Own"}
    with pytest.raises(ConfigError, match="two tools are called 'own'"):
        from_yaml(tmp_path, entry, entry)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"config": {}}, "entry 0 must be {class_name, config, tool_schema}, got the keys config"),
        ({"class_name": 3}, "entry 0 must be {class_name, config, tool_schema}"),
        ({"class_name": "{module}.Own", "schema": {}}, "got the keys class_name, schema"),
        ({"class_name": "{module}.Own", "config": [1]}, "entry 0 ('{module}.Own'): config must be a map, got [1]"),
        ({"class_name": "{module}.Own", "config": {"type": "mcp"}}, "config.type='mcp' is not supported"),
        ({"class_name": "{module}.plain"}, "entry 0 ('{module}.plain'): <function plain"),
        ({"class_name": "{module}.Nope"}, "entry 0 ('{module}.Nope'): "),
        ({"class_name": "{module}.Broken"}, "entry 0 ('{module}.Broken'): RuntimeError: no index"),
        ({"class_name": "{module}.Counter", "tool_schema": {"name": "x"}}, "('{module}.Counter'): tool_schema must be"),
        (
            {
                "class_name": "{module}.Counter",
                "tool_schema": {"function": {"name": "x", "parameters": {"required": 1}}},
            },
            "tool 'x': function.parameters.required is not JSON Schema",
        ),
    ],
)
def test_a_bad_entry_is_told_with_file_and_number(
    tmp_path: Path, module: str, entry: dict[str, Any], told: str
) -> None:
    """And its class."""
    filled = {key: one.replace("{module}", module) if isinstance(one, str) else one for key, one in entry.items()}
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, filled)
    assert told.replace("{module}", module) in str(caught.value)
    assert "tools.yaml: entry 0" in str(caught.value)
    assert str(caught.value).count("entry 0") == 1


def test_building_a_tool_has_a_deadline(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall E8: though it catches every Exception; alarm and handler are as before."""
    monkeypatch.setattr(load, "BUILD_DEADLINE_S", 0.01)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ConfigError, match=r"entry 0 \('.*Hangs'\) was not built within 0.01 s"):
        from_yaml(tmp_path, {"class_name": f"{module}.Hangs"})
    assert signal.getsignal(signal.SIGALRM) is before


def test_the_deadline_gives_back_the_timer_it_found() -> None:
    """Somebody else may wait for it."""
    interval = signal.getitimer(signal.ITIMER_REAL)[1]
    signal_before = signal.setitimer(signal.ITIMER_REAL, 1000, interval)
    try:
        with deadline(500):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, *signal_before)


def test_there_is_no_deadline_outside_the_main_thread() -> None:
    """Signals are the main thread's; tools are built all the same."""
    built: list[str] = []

    def build() -> None:
        with deadline(0.001):
            built.append("yes")

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert built == ["yes"]


def box(*names: str) -> Toolbox:
    def f() -> None: ...

    return Toolbox(FunctionTool(f, name) for name in names)


def test_a_row_chooses_its_tools() -> None:
    """In its order; None: all; the same objects, built once."""
    everything = box("a", "b", "c")
    assert everything.select(None) is everything
    chosen = everything.select(["c", "a", "c"])
    assert chosen.names == ["c", "a"]
    assert chosen.get("a") is everything.get("a")
    assert [one["function"]["name"] for one in chosen.schemas] == ["c", "a"]
    assert len(everything.select([])) == 0


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a", "z"], "tools: no tool 'z'; known: a, b"),
        ("a", "tools must be a list of names, got 'a'"),
        ([{"function": {}}], "tools must be a list of names"),
        (5, "tools must be a list of names, got 5"),
        ({"a": 1}, "tools must be a list of names, got {'a': 1}"),
    ],
)
def test_a_choice_that_cannot_be_is_the_rows_error(names: Any, told: str) -> None:
    """It lists the names."""
    with pytest.raises(InputError, match=told):
        box("a", "b").select(names)
