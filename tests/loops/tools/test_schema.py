"""Schemas of functions, and the arguments that fit them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from zagent.errors import ConfigError
from zagent.loops.tools import BadArguments, FunctionTool, ToolContext
from zagent.loops.tools.check import checked_schema
from zagent.loops.tools.schema import Signature


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    title: str = "here"


@dataclasses.dataclass
class Tree:
    leaf: int
    children: list[Tree] = dataclasses.field(default_factory=list)


def search(  # noqa: PLR0917
    query: str,
    limit: int = 3,
    exact: bool = False,
    mode: Literal["fast", "slow"] = "fast",
    color: Color | None = None,
    where: Optional[Point] = None,  # noqa: UP045
    weights: dict[str, float] = {},  # noqa: B006
    ranges: list[tuple[int, int]] = [],  # noqa: B006
    near: Annotated[float, Field(description="metres", gt=0)] = 1.0,
    anything: Any = None,
) -> str:
    """Search.

    Args:
        query: what to look for
        limit: at most
        near: not this, the annotation wins
    """
    return query


def test_a_schema_says_all_that_the_signature_says() -> None:
    """Types, defaults, choices, nested models, descriptions; no titles made up, no references."""
    schema = FunctionTool(search).get_openai_tool_schema()
    assert schema == checked_schema(schema)
    assert schema["function"]["name"] == "search"
    assert schema["function"]["description"] == "Search."
    parameters = schema["function"]["parameters"]
    assert list(parameters) == ["type", "properties", "required"]
    assert parameters == {
        "type": "object",
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "default": 3, "description": "at most"},
            "exact": {"type": "boolean", "default": False},
            "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
            "color": {"anyOf": [{"type": "string", "enum": ["red", "blue"]}, {"type": "null"}], "default": None},
            "where": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": "here"}},
                        "required": ["x"],
                    },
                    {"type": "null"},
                ],
                "default": None,
            },
            "weights": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
            "ranges": {
                "type": "array",
                "default": [],
                "items": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 2,
                    "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                },
            },
            "near": {"type": "number", "exclusiveMinimum": 0, "default": 1.0, "description": "metres"},
            "anything": {"default": None},
        },
    }


def test_a_type_that_contains_itself_keeps_its_reference() -> None:
    """There is no other way to say it."""

    def grow(tree: Tree) -> int:
        return tree.leaf

    parameters = Signature(grow, "grow").parameters
    assert parameters["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert set(parameters["$defs"]) == {"Tree"}


def test_arguments_become_what_the_annotations_say() -> None:
    """Models, enums, numbers; defaults where the model gave nothing."""
    values = Signature(search, "search").read({"query": "q", "color": "red", "where": {"x": 1}, "limit": "4"})
    assert values["color"] is Color.RED
    assert values["where"] == Point(x=1)
    assert (values["limit"], values["mode"], values["weights"], values["near"]) == (4, "fast", {}, 1.0)


def test_defaults_are_not_shared_between_calls() -> None:
    """A function that changes its default list changes its own."""
    signature = Signature(search, "search")
    signature.read({"query": "q"})["ranges"].append(1)
    assert signature.read({"query": "q"})["ranges"] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "query: Field required"),
        ({"query": 1}, "query: Input should be a valid string, got 1"),
        ({"query": "q", "nope": 1}, "nope: there is no such argument"),
        ({"query": "q", "limit": "x"}, "limit: Input should be a valid integer"),
        ({"query": "q", "where": {"x": "y"}}, "where.x: Input should be a valid integer"),
        ({"query": "q", "near": 0}, "near: Input should be greater than 0, got 0"),
        ({"limit": "x", "nope": 1}, "; "),
    ],
)
def test_arguments_that_do_not_fit_are_told_by_name(arguments: dict[str, Any], told: str) -> None:
    """Missing, of another type, of no name: for the model to read."""
    with pytest.raises(BadArguments) as caught:
        Signature(search, "search").read(arguments)
    assert told in str(caught.value)


def test_parameters_may_have_any_name() -> None:
    """Those of pydantic's own attributes, and with an underscore."""

    def odd(json: int, model_config: int, _x: int, self: int) -> int:
        return json

    signature = Signature(odd, "odd")
    given = {"json": 1, "model_config": 2, "_x": 3, "self": 4}
    assert list(signature.parameters["properties"]) == list(given)
    assert signature.read(given) == given


def test_the_context_is_not_the_models() -> None:
    """A parameter annotated `ToolContext`, or that or None, is hidden, and no argument of that name is taken."""

    def plain(a: int, context: ToolContext) -> int:
        return a

    def optional(a: int, where: ToolContext | None = None) -> int:
        return a

    for function, name in ((plain, "context"), (optional, "where")):
        signature = Signature(function, "f")
        assert signature.context == name
        assert list(signature.parameters["properties"]) == ["a"]
        with pytest.raises(BadArguments, match="no such argument"):
            signature.read({"a": 1, name: {}})


def star(*numbers: int) -> None: ...
def stars(**numbers: int) -> None: ...
def by_position(a: int, /) -> None: ...
def untyped_object(a: threading.Lock) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def no_schema(a: object.__class__) -> None: ...  # type: ignore[valid-type]
def not_json(a: Callable[[], int]) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (star, r"tool 'star' takes \*numbers: every"),
        (stars, r"tool 'stars' takes \*\*numbers: every"),
        (by_position, "tool 'by_position' takes a: every"),
        (untyped_object, "tool 'untyped_object': its annotations cannot be read: NameError"),
        (not_json, "tool 'not_json': Cannot generate a JsonSchema"),
    ],
)
def test_a_signature_without_a_schema_is_refused(function: Callable[..., Any], told: str) -> None:
    """By name, with the parameter or the reason."""
    with pytest.raises(ConfigError, match=told):
        FunctionTool(function)


def test_parameters_without_annotations_take_anything() -> None:
    """As Python does."""

    def f(a, b=2):  # type: ignore[no-untyped-def]
        return a

    signature = Signature(f, "f")
    assert signature.parameters["properties"] == {"a": {}, "b": {"default": 2}}
    assert signature.read({"a": [1]}) == {"a": [1], "b": 2}


def test_a_default_that_json_cannot_say_is_left_out() -> None:
    """Silently: the function has it all the same."""
    marker = object()

    def f(a: Any = marker) -> None: ...

    signature = Signature(f, "f")
    assert signature.parameters["properties"] == {"a": {}}
    assert signature.read({})["a"] is not None


GIVEN = {
    "type": "function",
    "strict": True,
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 1, "multipleOf": 2, "x-own": 1},
                "b": {"type": "array", "items": {"enum": ["x", 1, None]}, "uniqueItems": True},
                "c": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"$ref": "#/$defs/d"}]},
            },
            "required": ["a"],
            "$defs": {"d": {"const": 1}},
        },
    },
}


def test_a_given_schema_is_kept_as_it_is() -> None:
    """Pitfall E4: every keyword; only a missing `type` is filled in."""
    assert checked_schema(GIVEN) == GIVEN
    assert checked_schema({"function": {"name": "f"}}) == {"type": "function", "function": {"name": "f"}}


def with_parameters(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (None, "tool_schema must be"),
        ([], "tool_schema must be"),
        ({"type": "function"}, "tool_schema must be"),
        ({"name": "f", "parameters": {}}, "tool_schema must be"),
        ({"function": {"name": 1}}, "tool_schema must be"),
        ({"type": "tool", "function": {"name": "f"}}, "tool 'f': tool_schema.type must be 'function'"),
        ({"function": {"name": "f", "description": 1}}, "tool 'f': function.description must be text"),
        (with_parameters([]), "tool 'f': function.parameters must be a JSON Schema of type object"),
        (with_parameters({"type": "array"}), "tool 'f': function.parameters must be"),
        (
            with_parameters({"properties": []}),
            r"function.parameters.properties is not JSON Schema: \[\] is not of type",
        ),
        (
            with_parameters({"properties": {"a": {"type": "strng"}}}),
            r"function.parameters.properties.a.type is not JSON",
        ),
        (with_parameters({"required": "a"}), r"function.parameters.required is not JSON Schema"),
        (with_parameters({"properties": {"a": {"minimum": "1"}}}), r"function.parameters.properties.a.minimum is not"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: Any, told: str) -> None:
    """By the tool's name, and where in it."""
    with pytest.raises(ConfigError, match=told):
        checked_schema(schema)
