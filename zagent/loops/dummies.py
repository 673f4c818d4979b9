"""Dummy conversations that new messages are rendered behind, and probes that show what a template drops. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby, product
from typing import Any, NamedTuple

Message = dict[str, Any]

#: Letters only: a template's `trim`, `tojson` or `upper`-like filters leave them findable.
USER, ANSWER, PROBE = "zagentuser", "zagentanswer", "zagentprobe"


class Exchange(NamedTuple):
    """A dummy, the new messages as they go behind it, and the same dummy with a plain answer if this one calls tools.
    A dummy is a user's turn and an assistant's."""

    dummy: list[Message]
    new: list[Message]
    plain: list[Message]


def exchanges(messages: Sequence[Message], answer: str = ANSWER) -> Iterator[Exchange]:
    """Ways to say the same, the most literal first; templates differ in what they take.

    Tool messages need calls before them: ids of nine letters or digits (Mistral), no text beside the calls (Mistral),
    arguments as text (DeepSeek); or no calls, where a template knows none. Where there is no tool role, or it is
    ignored, the results are one user message (roles may have to alternate) in Qwen's tags. Last, all contents as lists
    of parts (Idefics).
    """
    ways = list(_in_text(list(messages), answer))
    yield from ways
    yield from (Exchange(*map(_in_parts, way)) for way in ways)


def _in_text(messages: list[Message], answer: str) -> Iterator[Exchange]:
    question = {"role": "user", "content": USER}
    plain = [question, {"role": "assistant", "content": answer}]
    if any(message.get("role") == "tool" for message in messages):
        arguments = ({"a": answer}, json.dumps({"a": answer}))
        for new, content, given in product((messages, _with_short_ids(messages)), (answer, ""), arguments):
            calls = {"role": "assistant", "content": content, "tool_calls": _calls(new, given)}
            yield Exchange([question, calls], new, plain)
        yield Exchange(plain, messages, plain)
    yield Exchange(plain, results_as_user(messages), plain)


def _calls(messages: list[Message], arguments: Any) -> list[Message]:
    """The calls that the tool messages answer, as OpenAI writes them."""
    results = [message for message in messages if message.get("role") == "tool"]
    return [
        {
            "id": message.get("tool_call_id") or f"call{i:05}",
            "type": "function",
            "function": {"name": message.get("name") or "tool", "arguments": arguments},
        }
        for i, message in enumerate(results)
    ]


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Ids that are not nine letters or digits become a hash that is."""

    def short(position: int, message: Message) -> str:
        old = str(message.get("tool_call_id") or position)
        return old if len(old) == 9 and old.isalnum() else sha256(old.encode()).hexdigest()[:9]

    return [
        {**message, "tool_call_id": short(i, message)} if message.get("role") == "tool" else message
        for i, message in enumerate(messages)
    ]


def results_as_user(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with each run of tool results as one user message."""
    said: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.get("role")):
        run = list(group)
        said += [{"role": "user", "content": _tagged([m.get("content") for m in run])}] if role == "tool" else run
    return said


def _tagged(contents: list[Any]) -> Any:
    if not any(isinstance(content, list) for content in contents):
        return "\n".join(f"<tool_response>\n{content or ''}\n</tool_response>" for content in contents)
    parts: list[Message] = []
    for content in contents:
        opening, closing = "\n<tool_response>\n" if parts else "<tool_response>\n", "\n</tool_response>"
        parts += [_text_part(opening), *_parts(content), _text_part(closing)]
    return parts


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with every content as a list of parts."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: Any) -> list[Message]:
    return content if isinstance(content, list) else [_text_part(content or "")]


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def with_probes(messages: Sequence[Message], *, blanks: bool = False) -> tuple[list[Message], dict[str, str]]:
    """``messages`` with a probe in place of each text, and each probe's role; blank texts stay unless ``blanks``."""
    roles: dict[str, str] = {}

    def probe(text: str | None, role: str) -> str | None:
        if not blanks and not (text or "").strip():
            return text
        word = f"{PROBE}{len(roles):04}"
        roles[word] = role
        return word

    def probed(content: Any, role: str) -> Any:
        if isinstance(content, list):
            return [{**part, "text": probe(part["text"], role)} if _is_text(part) else part for part in content]
        return probe(content, role) if content is None or isinstance(content, str) else content

    replaced = [
        {**message, "content": probed(message.get("content"), str(message.get("role")))} for message in messages
    ]
    return replaced, roles


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def shape(messages: Sequence[Message]) -> tuple[Any, ...]:
    """What a template may look at beside the texts: messages of one shape are rendered the same way."""
    return tuple(
        (
            message.get("role"),
            tuple(sorted(message)),
            _content_shape(message.get("content")),
            len(str(message.get("tool_call_id") or "")),
            len(message.get("tool_calls") or ()),
        )
        for message in messages
    )


def _content_shape(content: Any) -> Any:
    if isinstance(content, list):
        return tuple(
            (part.get("type"), bool(str(part.get("text") or "").strip())) if isinstance(part, dict) else type(part)
            for part in content
        )
    return bool(content.strip()) if isinstance(content, str) else type(content)
