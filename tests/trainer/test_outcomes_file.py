"""Outcomes are strict JSON lines that survive a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.outcomes import failed, ok
from zagent.errors import InputError
from zagent.images import read_media
from zagent.jsonl import to_json
from zagent.trainer.outcomes_file import OWN_KEYS, OutcomesFile, outcome_line, version_spans
from zagent.types import AgentLoopMetrics

USER = [{"role": "user", "content": "hi"}]


def test_a_line_has_the_contracts_keys_and_what_was_passed() -> None:
    """Every key of the contract; passed keys beside them, never over them."""
    extra = {
        "rollout_versions": np.array([3, 3]),
        "response_text": "hello",
        "reward_extra_info": {"acc": 1},
        "turn_scores": [1.0],
    }
    outcome = ok(
        0, np.array([1, 2], np.int32), np.array([5, 6], np.int32), response_logprobs=np.array([-0.5, -1.0], np.float32),
        reward_score=0.5, num_turns=2, extra_fields=extra, metrics=AgentLoopMetrics(compute_score=1.5, tool_calls_ok=2),
    )  # fmt: skip
    line = to_json(outcome_line(outcome, USER, {"data_source": "gsm", "status": "mine"}))
    assert line.pop("metrics") == {
        "generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 1.5, "num_preempted": -1,
        "tool_calls_ok": 2, "tool_calls_failed": 0, "tool_calls_skipped": 0,
    }  # fmt: skip
    assert line == {
        "uid": "u0", "sample": 0, "status": "ok", "error": None, "attempt": 1,
        "messages": [*USER, {"role": "assistant", "content": "hello"}],
        "prompt_ids": [1, 2], "response_ids": [5, 6], "response_mask": [1, 1], "response_logprobs": [-0.5, -1.0],
        "versions": [[3, 0, 2]], "num_turns": 2, "reward_score": 0.5, "reward_extra_info": {"acc": 1},
        "extra_fields": {"turn_scores": [1.0]}, "data_source": "gsm",
    }  # fmt: skip


def test_a_failed_line_has_the_same_keys() -> None:
    """Its error as text, the prompt's messages, and None for all it does not have."""
    line = outcome_line(failed(2), USER, {})
    assert set(line) == set(OWN_KEYS)
    assert (line["status"], line["error"], line["messages"]) == ("failed", "LoopError: it broke", USER)
    assert line["response_ids"] is line["metrics"] is line["versions"] is None


def test_the_loops_own_messages_win() -> None:
    """A loop of several turns tells its conversation itself."""
    said = [*USER, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    assert outcome_line(ok(extra_fields={"messages": said}), USER, {})["messages"] == said


def test_images_are_told_and_pixels_are_not() -> None:
    """An image in a message becomes a data: URL, with which the line can be a prompt again; what the model saw of it
    would be 20 MB of numbers, and its place among the tokens says enough."""
    said = [{"role": "tool", "content": [{"type": "image", "image": b"picture"}]}]
    fields = {"messages": said, "image_spans": np.array([[1, 3]]), "multi_modal_inputs": {"pixel_values": np.zeros(9)}}
    line = to_json(outcome_line(ok(extra_fields=fields), USER, {}))
    assert read_media(line["messages"][0]["content"][0]["image"]) == b"picture"
    assert line["extra_fields"] == {"image_spans": [[1, 3]]}


def test_without_a_decoded_answer_messages_are_the_prompts() -> None:
    """Nothing is invented."""
    assert outcome_line(ok(), USER, {})["messages"] == USER


@pytest.mark.parametrize(
    ("versions", "spans"),
    [
        (None, None),
        ([], []),
        ([-1, -1], []),
        ([1, 1, -1, 1, 2], [(1, 0, 2), (1, 3, 4), (2, 4, 5)]),
        (np.array([0, 1], np.int32), [(0, 0, 1), (1, 1, 2)]),
    ],
)
def test_versions_become_spans(versions: Any, spans: Any) -> None:
    """Runs of one version as (version, start, end); unsampled tokens are in none."""
    assert version_spans(versions) == spans


def test_each_line_is_on_disk_when_written(tmp_path: Path) -> None:
    """Another process sees it before the file is closed."""
    with OutcomesFile(tmp_path / "o.jsonl") as file:
        file.begin()
        file.write({"text": "héllo 你\ud83d"})
        assert json.loads((tmp_path / "o.jsonl").read_text("utf-8")) == {"text": "héllo 你\ud83d"}
    assert file.lines == 1


def test_an_earlier_run_is_kept_until_the_work_begins(tmp_path: Path) -> None:
    """Opening for the check destroys nothing; beginning starts afresh."""
    path = tmp_path / "o.jsonl"
    path.write_text("old\n")
    with OutcomesFile(path):
        pass
    assert path.read_text() == "old\n"
    with OutcomesFile(path) as file:
        file.begin()
        file.write({})
    assert path.read_text() == "{}\n"


def test_a_file_made_for_the_check_is_removed_again(tmp_path: Path) -> None:
    """A job that never began leaves nothing."""
    with OutcomesFile(tmp_path / "o.jsonl"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/o.jsonl", "."])
def test_an_output_that_cannot_be_written_is_found_at_once(tmp_path: Path, name: str) -> None:
    """No such directory, or a directory: named before any work."""
    with pytest.raises(InputError, match=r"outcomes file .* cannot be written"):
        OutcomesFile(tmp_path / name)


def test_the_prompts_file_is_never_the_output(tmp_path: Path) -> None:
    """Also under another name."""
    prompts, other = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text("{}")
    other.symlink_to(prompts)
    with pytest.raises(InputError, match="is the prompts file"):
        OutcomesFile(other, prompts=prompts)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_names_the_file() -> None:
    """The error says which file, and how many outcomes it has."""
    file = OutcomesFile(Path("/dev/full"))
    file.begin()
    with pytest.raises(OSError, match="after 0 outcomes: '/dev/full'"):
        file.write({})
    with pytest.raises(OSError, match="No space left"):  # what is still buffered cannot go anywhere either
        file.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_the_first_error_of_a_full_disk_is_the_one_that_is_seen() -> None:
    """Closing fails as well, and knows less."""
    with pytest.raises(OSError, match="after 0 outcomes: '/dev/full'"), OutcomesFile(Path("/dev/full")) as file:
        file.begin()
        file.write({})
