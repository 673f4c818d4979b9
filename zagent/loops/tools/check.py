"""Is a schema one? Pure."""

from __future__ import annotations

from typing import Any

from zagent.errors import ConfigError


def checked_schema(schema: Any) -> dict[str, Any]:
    """``schema`` with its `type` filled in and nothing else changed.

    Raises:
        ConfigError: it is not OpenAI's form of a function, or its parameters are not JSON Schema; says where.
    """
    function: Any = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            'tool_schema must be {"type": "function", "function": {"name": …, "parameters": …}}, '
            f"got {schema!r:.200}"
        )
    if schema.get("type", "function") != "function":
        raise ConfigError(f"tool {name!r}: tool_schema.type must be 'function', got {schema['type']!r}")
    if not isinstance(function.get("description", ""), str):
        raise ConfigError(f"tool {name!r}: function.description must be text")
    if "parameters" in function:
        _check_parameters(name, function["parameters"])
    return {"type": "function", **schema}


def _check_parameters(name: str, parameters: Any) -> None:
    from jsonschema import SchemaError  # 0.1 s, and only where tools are built
    from jsonschema.validators import Draft202012Validator, validator_for

    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ConfigError(f"tool {name!r}: function.parameters must be a JSON Schema of type object")
    try:
        validator_for(parameters, default=Draft202012Validator).check_schema(parameters)
    except SchemaError as error:
        where = "".join(f".{part}" for part in error.absolute_path)
        raise ConfigError(
            f"tool {name!r}: function.parameters{where} is not JSON Schema: {error.message:.200}"
        ) from error
