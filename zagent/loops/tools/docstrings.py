"""What a docstring says of a function and its parameters: Google's, NumPy's and reST's ways of writing. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

_HEADING = re.compile(r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises)\s*:?\s*$")
_PARAMETERS = ("Args", "Arguments", "Parameters", "Params")
#: `name: text`, `name (type): text`
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\)|\[[^\]]*\])?\s*:\s*(.*)$")
#: `name`, `name : type`, `first, second : type`
_NUMPY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
#: `:param name: text`, `:param type name: text`
_REST = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_FIELD = re.compile(r":(\w+)(\s[^:]*)?:")


def read_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """(the description, each parameter's text in one line)."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    end = next((number for number, _ in enumerate(lines) if _ends_description(lines, number)), len(lines))
    texts = {**_rest(lines), **_sections(lines)}
    return "\n".join(lines[:end]).strip(), {name: text for name, text in texts.items() if text}


def _ends_description(lines: list[str], number: int) -> bool:
    return _is_heading(lines, number) or bool(_FIELD.match(lines[number]))


def _is_heading(lines: list[str], number: int) -> bool:
    """`Args:`, or `Parameters` over a line of dashes."""
    line = lines[number]
    return bool(_HEADING.match(line)) and (line.rstrip().endswith(":") or _is_underlined(lines, number))


def _is_underlined(lines: list[str], number: int) -> bool:
    return number + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[number + 1]) is not None


def _sections(lines: list[str]) -> dict[str, str]:
    for number, line in enumerate(lines):
        if _is_heading(lines, number) and line.startswith(_PARAMETERS):
            return _numpy(lines[number + 2 :]) if _is_underlined(lines, number) else _google(lines[number + 1 :])
    return {}


def _google(lines: list[str]) -> dict[str, str]:
    """Entries at the depth of the first line; what is deeper continues the entry before."""
    body = list(_indented(lines))
    depth = min((_depth(line) for line in body if line.strip()), default=0)
    found: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in body:
        match = _GOOGLE.match(line.strip()) if _depth(line) == depth else None
        if match:
            entry = found.setdefault(match[1], [match[2]])
        else:
            entry.append(line)
    return _joined(found)


def _numpy(lines: list[str]) -> dict[str, str]:
    """Names at the margin, their texts indented, until the next underlined heading."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        if line.strip() and not line[0].isspace():
            names = _NUMPY.match(line.strip())
            if names is None or _is_underlined(lines, number):
                break
            text: list[str] = []
            found.update(dict.fromkeys(re.findall(r"\w+", names[1]), text))
        elif found:
            text.append(line)
    return _joined(found)


def _rest(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in lines:
        if match := _REST.match(line):
            entry = found.setdefault(match[1], [match[2]])
        elif line[:1].isspace():
            entry.append(line)
        else:
            entry = []
    return _joined(found)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    """Up to the first line that is at the margin."""
    for line in lines:
        if line.strip() and not line[0].isspace():
            return
        yield line


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(found: dict[str, list[str]]) -> dict[str, str]:
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}
