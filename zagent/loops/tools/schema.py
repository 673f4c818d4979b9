"""JSON schemas of functions, built by pydantic, and a check of schemas that came from elsewhere. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from zagent.errors import ConfigError
from zagent.loops.tools.base import BadArguments, ToolContext
from zagent.loops.tools.docstrings import read_docstring

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Signature:
    """What a function takes from the model.

    Attributes:
        description: of its docstring.
        parameters: JSON schema of the arguments.
        context: name of the parameter annotated `ToolContext`, or None.

    Raises:
        ConfigError: `*args`, `**kwargs`, positional-only parameters, or a type that has no JSON schema.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.description, texts = read_docstring(function.__doc__)
        self.context = context_parameter(function)
        taken = [(one, hint) for one, hint in _parameters(function, name) if one.name != self.context]
        try:
            fields = {f"field_{number}": _field(*each, texts) for number, each in enumerate(taken)}
            self._model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]
            self.parameters = _json_schema(self._model)
        except PydanticUserError as error:  # a type without a schema, or without one in JSON
            raise ConfigError(f"tool {name!r}: {str(error).splitlines()[0]}") from error

    def read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """``arguments`` as the function's annotations want them, defaults filled in. Raises `BadArguments`."""
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise BadArguments("; ".join(_told(one) for one in error.errors())) from error
        return {str(field.alias): getattr(model, key) for key, field in type(model).model_fields.items()}


def context_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the parameter of ``function`` that is annotated `ToolContext`, or None."""
    try:
        hints = get_type_hints(function)
    except Exception:  # names that only type checkers know; whoever needs the hints raises
        hints = getattr(function, "__annotations__", {})
        return next((name for name, hint in hints.items() if str(hint).endswith("ToolContext")), None)
    wanted = (name for name, hint in hints.items() if hint is ToolContext or ToolContext in get_args(hint))
    return next((name for name in wanted if name != "return"), None)


def _parameters(function: Callable[..., Any], name: str) -> list[tuple[inspect.Parameter, Any]]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigError(f"tool {name!r}: its annotations cannot be read: {type(error).__name__}: {error}") from error
    found = list(inspect.signature(function).parameters.values())
    for parameter in found:
        if parameter.kind not in _BY_NAME:
            given = parameter.replace(annotation=parameter.empty)
            raise ConfigError(
                f"tool {name!r} takes {given}: every parameter must have a name of its own and be given by name"
            )
    return [(parameter, hints.get(parameter.name, Any)) for parameter in found]


def _field(parameter: inspect.Parameter, hint: Any, texts: Mapping[str, str]) -> tuple[Any, Any]:
    """A field of pydantic's. It has the parameter's name as alias: as names `json` or `_x` would be refused."""
    described = any(getattr(part, "description", None) for part in get_args(hint)[1:])  # Annotated[…, Field(…)]
    keywords: dict[str, Any] = {"alias": parameter.name}
    if parameter.name in texts and not described:
        keywords["description"] = texts[parameter.name]
    if parameter.default is not inspect.Parameter.empty:
        keywords["default"] = parameter.default
    return hint, Field(**keywords)


_ORDER = ("type", "properties", "required")


class _Generator(GenerateJsonSchema):
    """Without the titles that pydantic makes up, and silent about a default that JSON cannot say."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (pydantic's)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_Generator)
    definitions = schema.pop("$defs", {})
    schema.pop("title")
    for name, definition in definitions.items():
        if definition.get("title") == name:
            del definition["title"]
    # Models know schemas in this order; that other arguments are refused they need not read in every prompt.
    schema.pop("additionalProperties", None)
    schema = {key: schema[key] for key in dict.fromkeys((*_ORDER, *schema)) if key in schema}
    if not definitions:
        return schema
    try:
        return _inline(schema, definitions)  # type: ignore[no-any-return]
    except RecursionError:  # a model that contains itself
        return {**schema, "$defs": definitions}


def _inline(node: Any, definitions: Mapping[str, Any]) -> Any:
    """References replaced by what they mean: templates print a parameter's type, and find none in a reference."""
    if isinstance(node, list):
        return [_inline(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    meant = definitions.get(str(node.get("$ref")).removeprefix("#/$defs/"), {})
    own = {key: value for key, value in node.items() if not (meant and key == "$ref")}
    return {key: _inline(value, definitions) for key, value in {**meant, **own}.items()}


def _told(error: Mapping[str, Any]) -> str:
    where, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no such argument"
    said = f"{where}: {error['msg']}" if where else str(error["msg"])
    return said if error["type"] == "missing" else f"{said}, got {value!r}"
