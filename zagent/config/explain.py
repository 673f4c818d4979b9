"""What is said about a configuration that cannot be used: the key, its value, and what would be right. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

#: pydantic's error types that say "you gave another kind of thing", in the words of YAML.
_WANTED = {
    "tuple_type": "must be a list",
    "dict_type": "must be a map",
    "finite_number": "must be a finite number",
}


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """All mistakes in one line, each with its key."""
    told: dict[str, list[str]] = {}
    for one in error.errors():
        start, text = _explain(one, root)
        told.setdefault(start, []).append(text)
    return "; ".join(start + " or ".join(texts) for start, texts in told.items())


def explain_yaml(error: Exception) -> str:
    """A YAML parser's error in one line, with the line it is in."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return str(error) if problem is None or mark is None else f"not YAML: {problem} in line {mark.line + 1}"


def explain_value(error: Exception) -> str:
    """OmegaConf's error about a value (an interpolation, a missing one) in one line, with the key."""
    key, said = getattr(error, "full_key", None), str(error).partition("\n")[0]
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key}=??? must be given"
    return f"{key}: {said}" if key else said


def nearest_key(key: str, root: type[BaseModel]) -> str | None:
    """The valid key most like ``key``; the same last word in another section counts as near."""
    names = list(_keys(root, key))
    found = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if found:
        return found[0]
    last = key.rpartition(".")[2]
    found = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in names], n=1, cutoff=0.7)
    return next((name for name in names if found and name.rpartition(".")[2] == found[0]), None)


def _explain(error: Mapping[str, Any], root: type[BaseModel]) -> tuple[str, str]:
    """(which key and value, what is wrong): the alternatives of one key say the first only once."""
    key = ".".join(str(part) for part in error["loc"] if part not in ("int", "float", "literal['auto']"))
    if error["type"] == "extra_forbidden":
        near = nearest_key(key, root)
        return f"unknown key {key!r}", f", did you mean {near!r}?" if near else ""
    return _start(key, error.get("input")), _wrong(error, key)


def _start(key: str, value: Any) -> str:
    if not key:
        return "the configuration "
    return f"{key}: " if isinstance(value, dict) else f"{key}={value!r}: "


def _wrong(error: Mapping[str, Any], key: str) -> str:
    if error["type"] == "model_type":
        return f"must be a section ({key}.NAME=…)" if key else "must be a mapping of sections"
    wanted = _WANTED.get(error["type"])
    if wanted == "must be a list" and isinstance(error.get("input"), (str, int)):
        return f"{wanted}: {key}=[{error['input']}]"
    return wanted or error["msg"].removeprefix("Value error, ").replace("Input should", "should")


def _keys(model: type[BaseModel], given: str, prefix: str = "") -> Iterable[str]:
    """All valid keys; of sections by the user's own names (`services.NAME`) those of the name in ``given``."""
    for name, info in model.model_fields.items():
        key = prefix + name
        yield key
        section = _section(info.annotation)
        if get_origin(info.annotation) is dict:
            entry = given.removeprefix(f"{key}.").partition(".")[0] if given.startswith(f"{key}.") else ""
            section, key = (section if entry else None), f"{key}.{entry}"
        if section is not None:
            yield from _keys(section, given, f"{key}.")


def _section(kind: Any) -> type[BaseModel] | None:
    """The section in ``Section``, ``Section | None`` or ``dict[str, Section]``."""
    kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
    return kinds[0] if kinds else None
