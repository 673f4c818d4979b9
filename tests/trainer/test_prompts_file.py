"""Prompts are read line by line; a broken line is named by file and number."""

from __future__ import annotations

from pathlib import Path

import pytest

from zagent.config import RolloutConfig
from zagent.errors import InputError
from zagent.trainer.prompts_file import Prompt, batch_of, parse_line, read_prompts, refuse_broken
from zagent.trainer.rows import rows_of

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "line",
    [
        b'{"raw_prompt": [{"role": "user", "content": "hi"}]}',
        b'{"prompt": [{"role": "user", "content": "hi"}]}',
        b'{"prompt": "hi"}\r',
        b'{"prompt": "hi", "uid": null, "agent_name": null}',
    ],
)
def test_text_and_messages_become_a_conversation(line: bytes) -> None:
    """Text is one user message; messages are taken as they are; a missing uid is made from the line's number."""
    prompt = parse_line(line, 3)
    assert (prompt.raw_prompt, prompt.uid, prompt.line) == (USER, "line-3", 3)


def test_everything_else_is_passed_through() -> None:
    """Known and unknown keys alike; beside raw_prompt, a `prompt` is a key like any other."""
    line = b'{"raw_prompt": [{"role": "user", "content": "hi"}], "prompt": "p", "uid": 7, "agent_name": "a", "x": [1]}'
    assert parse_line(line, 1) == Prompt(1, 7, USER, {"prompt": "p", "agent_name": "a", "x": [1]})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "hi"', "not JSON: Expecting ',' delimiter at column 16"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'["hi"]', "must be a JSON object, got list"),
        (b'{"text": "hi"}', "neither 'raw_prompt'"),
        (b'{"prompt": 3}', "'prompt' must be a non-empty list"),
        (b'{"raw_prompt": "hi"}', "'raw_prompt' must be a non-empty list of chat messages, got str"),
        (b'{"raw_prompt": []}', "'raw_prompt' must be a non-empty list"),
        (b'{"raw_prompt": [{"content": "hi"}]}', r"'raw_prompt'\[0\] must be an object with a 'role'"),
        (b'{"prompt": "hi", "status": "ok"}', "key 'status' is reserved"),
        (b'{"prompt": "hi", "sample": 1}', "key 'sample' is reserved"),
        (b'{"prompt": "hi", "sampling_params": {}}', "key 'sampling_params' is reserved"),
        (b'{"prompt": "hi", "agent_name": 3}', "agent_name must be text, got int"),
        (b'{"prompt": "hi", "uid": [1]}', "uid must be text or an integer, got list"),
    ],
)
def test_a_broken_line_says_why(line: bytes, reason: str) -> None:
    """Each kind of broken line has its reason."""
    with pytest.raises(InputError, match=reason):
        parse_line(line, 1)


def test_broken_lines_are_reported_beside_the_good_ones(tmp_path: Path) -> None:
    """File and line number, counted with blank lines and a byte-order mark in place."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt"\n{"prompt": "b"}')
    prompts, broken = read_prompts(path)
    assert [prompt.line for prompt in prompts] == [1, 5]
    assert [text.split(": ")[0] for text in broken] == [f"{path}:4"]


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """Missing, or a directory."""
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / name)


def test_many_broken_lines_are_quoted_up_to_a_limit() -> None:
    """An error of a thousand lines helps nobody."""
    refuse_broken([])
    with pytest.raises(InputError, match=r"(?s)f:1: x.*f:5: x\nand 2 more$"):
        refuse_broken([f"f:{i}: x" for i in range(1, 8)])


def test_rows_are_multiplied_and_stamped() -> None:
    """n rows per prompt, together, with uid and sample; lines of one uid go on counting."""
    prompts = [Prompt(1, "a", USER, {"x": 1}), Prompt(2, "b", USER, {"y": 2}), Prompt(3, "a", USER)]
    batch, rows = batch_of(prompts, 2)
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == ["a", "a", "b", "b", "a", "a"]
    assert columns["sample"].tolist() == [0, 1, 0, 1, 2, 3]
    assert columns["x"].tolist() == [1, 1, None, None, None, None]
    assert [row.line for row in rows] == [1, 1, 2, 2, 3, 3]


def test_the_stamps_reach_the_rows() -> None:
    """Seeds of a batch job count samples as the file does."""
    batch, _ = batch_of([Prompt(1, "a", USER, {"agent_name": "tool_agent"})], 2)
    found = rows_of(batch, RolloutConfig())
    assert [(row.uid, row.sample, row.agent_name) for row in found] == [("a", 0, "tool_agent"), ("a", 1, "tool_agent")]
