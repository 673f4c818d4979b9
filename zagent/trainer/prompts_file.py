"""The prompts of a batch job: one JSON object a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.outcomes_file import OWN_KEYS

#: Keys that the outcome line or the call of the loop needs; a prompt's own value would be lost or mistaken for ours.
RESERVED = ({*OWN_KEYS} | {"sampling_params"}) - {"uid"}

#: Broken lines quoted in one error; more are counted.
QUOTED = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line. ``passed`` is everything but the conversation and the uid, handed to the loop and to the outcome."""

    line: int
    uid: Any
    raw_prompt: list[dict[str, Any]]
    passed: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> tuple[list[Prompt], list[str]]:
    """All usable prompts of the file and one text (`file:line: reason`) per broken line. Blank lines are skipped.

    Raises:
        InputError: the file cannot be read.
    """
    prompts: list[Prompt] = []
    broken: list[str] = []
    try:
        for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            try:
                prompts += [parse_line(line, number)] if line.strip() else []
            except InputError as error:
                broken.append(f"{path}:{number}: {error}")
    except OSError as error:
        raise InputError(f"prompts file {path} cannot be read: {error.strerror or error}") from error
    return prompts, broken


def parse_line(line: bytes, number: int) -> Prompt:
    """The prompt in one line of JSON. Raises `InputError` with the reason."""
    try:
        data = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets thousands deep
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"must be a JSON object, got {type(data).__name__}")
    taken = sorted(data.keys() & RESERVED)
    if taken:
        raise InputError(f"key {taken[0]!r} is reserved for the outcome or the loop; give it another name")
    _check_text(data, "agent_name")
    messages = _take_messages(data)
    uid = data.pop("uid", None)
    if uid is not None and not isinstance(uid, (str, int)):
        raise InputError(f"uid must be text or an integer, got {type(uid).__name__}")
    return Prompt(number, f"line-{number}" if uid is None else uid, messages, data)


def refuse_broken(broken: Sequence[str]) -> None:
    """Raise `InputError` quoting the first broken lines, if there are any."""
    if broken:
        more = f"\nand {len(broken) - QUOTED} more" if len(broken) > QUOTED else ""
        raise InputError("\n".join(broken[:QUOTED]) + more)


def batch_of(prompts: Sequence[Prompt], n: int) -> tuple[DataProto, list[Prompt]]:
    """Each prompt ``n`` times in a row, stamped (`uid`, `sample`), and the prompt of each row.

    Lines with the same uid are samples of one prompt: their numbers continue. A key that only some lines have is
    None in the others.
    """
    rows = [prompt for prompt in prompts for _ in range(n)]
    columns: dict[str, Any] = {key: [row.passed.get(key) for row in rows] for key in _keys(prompts)}
    columns["raw_prompt"] = [row.raw_prompt for row in rows]
    columns["uid"] = [row.uid for row in rows]
    columns["sample"] = list(_numbers(columns["uid"]))
    return DataProto(non_tensor_batch=columns), rows


def _keys(prompts: Sequence[Prompt]) -> list[str]:
    return list(dict.fromkeys(key for prompt in prompts for key in prompt.passed))


def _numbers(uids: Sequence[Any]) -> Iterator[int]:
    seen: Counter[str] = Counter()
    for uid in uids:
        yield seen[str(uid)]
        seen[str(uid)] += 1


def _check_text(data: dict[str, Any], key: str) -> None:
    if data.get(key) is not None and not isinstance(data[key], str):
        raise InputError(f"{key} must be text, got {type(data[key]).__name__}")


def _take_messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    if "raw_prompt" in data:
        return _messages("raw_prompt", data.pop("raw_prompt"))
    if "prompt" not in data:
        raise InputError("has neither 'raw_prompt' (a list of chat messages) nor 'prompt' (text or messages)")
    prompt = data.pop("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _messages("prompt", prompt)


def _messages(key: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else type(value).__name__
        raise InputError(f"{key!r} must be a non-empty list of chat messages, got {got}")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{key!r}[{i}] must be an object with a 'role'")
    return value
