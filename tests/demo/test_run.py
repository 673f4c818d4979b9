"""The demonstration, with a manager that needs no processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.fake_manager import FakeManager
from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.demo.recheck import largest_difference
from zagent.demo.run import ROWS, run_demo
from zagent.demo.show import transcript
from zagent.errors import InputError
from zagent.loops.tokenizer import load_tokenizer
from zagent.models import resolve
from zagent.types import AgentLoopOutput, Outcome

SAMPLED, INSERTED = "It is 5.<|im_end|>", "\n<|im_start|>tool\n5<|im_end|>\n"


def output(answer: str = "The answer is 5.", result: str = "5") -> AgentLoopOutput:
    """A trajectory of two answers with a tool's result between them, its log-probabilities computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve("tiny")
    tokenizer = load_tokenizer(path)
    prompt = tokenizer.encode("<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    parts = [(1, tokenizer.encode(SAMPLED)), (0, tokenizer.encode(INSERTED)), (1, tokenizer.encode(SAMPLED))]
    response = [token for _, ids in parts for token in ids]
    mask = [sampled for sampled, ids in parts for _ in ids]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1], dim=-1)
    log_probs = rows[torch.arange(len(response)), torch.tensor(response)].numpy() * np.array(mask)
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=log_probs.astype(np.float32),
        num_turns=4,
        extra_fields={"messages": messages},
    )


def config(*overrides: str) -> Config:
    return Config.load(overrides=["model.path=tiny", *overrides])


def test_the_recheck_looks_at_sampled_tokens_at_the_temperature() -> None:
    """Next to nothing for the right values; far off when they are moved by one, or at another temperature."""
    right = output()
    path = resolve("tiny")
    assert largest_difference([right], path, 1.0) < 1e-5
    assert largest_difference([right], path, 0.7) > 0.01
    moved = right.model_copy(update={"response_logprobs": np.roll(right.response_logprobs, 1)})
    assert largest_difference([right, moved], path, 1.0) > 1.0
    assert largest_difference([], path, 1.0) == 0.0


def test_a_transcript_sets_inserted_tokens_apart() -> None:
    """Runs of one kind, each with its count, nothing left out."""
    text = transcript(output(), load_tokenizer(resolve("tiny")))
    heads = [line.split("│")[0].split() for line in text.splitlines() if line.split("│")[0].strip()]
    assert [head[0] for head in heads] == ["prompt", "sampled", "inserted", "sampled"]
    assert [int(head[1]) for head in heads[1:]] == [9, 10, 9]
    assert "│ It is 5.<|im_end|>" in text


class Rows:
    """Answers all rows alike, but for those of ``odd``."""

    def __init__(self, **odd: Any) -> None:
        self.good, self.odd = output(), odd

    def __call__(self, i: int, batch: DataProto) -> Outcome | BaseException:
        uid = batch.non_tensor_batch["uid"][i]
        found = self.odd.get(uid.replace("-", "_"), self.good)
        if isinstance(found, KeyboardInterrupt):
            return found
        if isinstance(found, Exception):
            return Outcome(i, uid, 0, "failed", None, found)
        return Outcome(i, uid, 0, "ok", found)


def test_all_figures_are_printed_and_all_outcomes_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both rounds; simulated engines, whose answers mean nothing, are not judged by them."""
    out = tmp_path / "o.jsonl"
    assert run_demo(config("engine.kind=sim", "rollout.temperature=1.0"), out, FakeManager(Rows()).launch) == 0
    shown = capsys.readouterr().out
    assert f"of {ROWS} answers are right, through the tool" in shown
    assert f"{ROWS} of {ROWS} answers are what the tool said" in shown
    assert "1 of 1 used" in shown
    assert "4 rows against transformers at temperature 1" in shown
    assert "inserted" in shown
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * ROWS
    assert {line["uid"].partition("-")[0] for line in lines} == {"right", "wrong"}


def test_a_failed_row_is_a_failed_demonstration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On any engine."""
    rows = Rows(wrong_3=ValueError("broken"))
    assert run_demo(config("engine.kind=sim"), tmp_path / "o", FakeManager(rows).launch) == 1
    assert "NOT as it should be" in capsys.readouterr().out


def test_the_built_in_model_on_real_engines_is_judged(tmp_path: Path) -> None:
    """Answers that are not right, or are not what the tool said, or log-probabilities that are off: status 1."""
    assert run_demo(config("rollout.temperature=1.0"), tmp_path / "o", FakeManager(Rows()).launch) == 1
    assert run_demo(config("rollout.temperature=0.5"), tmp_path / "o", FakeManager(Rows()).launch) == 1


def test_ctrl_c_keeps_what_was_written(tmp_path: Path) -> None:
    """Status 130."""
    out = tmp_path / "o.jsonl"
    rows = Rows(right_60=KeyboardInterrupt())
    assert run_demo(config("engine.kind=sim"), out, FakeManager(rows).launch) == 130
    assert len(out.read_text().splitlines()) == 3


def test_an_unwritable_output_is_found_before_the_launch(tmp_path: Path) -> None:
    """Nothing has been started."""
    manager = FakeManager(Rows())
    with pytest.raises(InputError, match="cannot be written"):
        run_demo(config(), tmp_path / "missing" / "o", manager.launch)
    assert manager.launched is None
