"""What the model is trained on, and that training trains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from zagent.tiny import tokenizer as tiny_tokenizer
from zagent.tiny import train
from zagent.tiny.arithmetic import RESULT_LIMIT, evaluate, questions
from zagent.tiny.conversations import Conversation, conversations, true_results, wrong, wrong_results

TOKENIZER = tiny_tokenizer.build()


@pytest.fixture
def threads_kept() -> Iterator[None]:
    """The script sets torch's number of threads, for the whole process."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def test_conversations_come_from_their_seed() -> None:
    """The same seed gives the same ones."""
    first, second, other = (list(islice(conversations(seed), 50)) for seed in (1, 1, 2))
    assert first == second != other


def test_conversations_vary() -> None:
    """With and without a system text, with other wordings of the tool, other tools, and earlier rounds."""
    made = list(islice(conversations(0, with_tools=0.5), 400))
    assert {"system", "user"} == {one.messages[0]["role"] for one in made}
    assert {0, 1, 2} == {len(one.tools or []) for one in made}
    assert {1, 2, 3} == {sum(message["role"] == "user" for message in one.messages) for one in made}
    assert len({str(one.tools) for one in made}) > 10


def test_the_tool_is_often_wrong() -> None:
    """In about a third of the conversations, so that copying is the only way."""
    made = list(islice(conversations(0), 600))
    assert 0.27 < sum(not _honest(one) for one in made) / len(made) < 0.43


def _honest(conversation: Conversation) -> bool:
    """Whether every result is what its call is worth."""
    messages = conversation.messages
    calls = [call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ())]
    results = [one["content"] for one in messages if one["role"] == "tool"]
    worth = [str(evaluate(call.removeprefix('{"expression": "').removesuffix('"}'))) for call in calls]
    return worth == results


@given(st.integers(-(10**10), 10**10), st.integers())
def test_a_wrong_number_is_wrong(number: int, seed: int) -> None:
    """Never the right one, never longer than seven digits."""
    found = wrong(number, random.Random(seed))
    assert found != number
    assert abs(found) < RESULT_LIMIT


def test_a_wrong_digit_is_wrong() -> None:
    """Small numbers too, which one out of the blue often hits."""
    rng = random.Random(0)
    assert all(wrong(number % 10, rng) != number % 10 for number in range(500))


def test_wrong_results_are_wrong_in_each_step() -> None:
    """The second step's is wrong for the expression that has the first one in it."""
    for question in questions(5, 100):
        results = wrong_results(question, random.Random(0))
        assert all(evaluate(question.expression(at, results)) != results[at] for at in range(len(results)))
        assert true_results(question)[-1] == question.answer


def test_only_the_assistant_is_learnt() -> None:
    """Labels are what the assistant says in each of its turns, end token included."""
    conversation = next(one for one in conversations(0) if len(one.messages) == 6)
    ids, labels = train.labelled(TOKENIZER, conversation)
    assert len(ids) == len(labels)
    assert all(label in (token, train.IGNORED) for token, label in zip(ids, labels, strict=True))
    learnt = TOKENIZER.decode([label for label in labels if label != train.IGNORED])
    text = TOKENIZER.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    turns = text.split("<|im_start|>assistant\n")[1:]
    assert learnt == "".join(turn.split("<|im_end|>")[0] + "<|im_end|>" for turn in turns)


def test_batches_are_padded_where_nothing_is_learnt() -> None:
    """Ids end with padding, labels with -100; none is longer than the limit."""
    for ids, labels in islice(train.batches(TOKENIZER, conversations(0), 0), train.POOL):
        assert ids.shape == labels.shape
        assert ids.shape[0] == train.BATCH
        assert ids.shape[1] <= train.LONGEST
        assert (labels[ids == TOKENIZER.pad_token_id] == train.IGNORED).all()


def test_the_loss_is_of_labelled_tokens_only() -> None:
    """It is the usual shifted cross entropy where only they are labelled, and other tokens' labels change nothing."""
    torch.manual_seed(0)
    model = train.new_model(len(TOKENIZER))
    ids = torch.randint(0, 256, (2, 20))
    labels = torch.where(torch.arange(20) % 3 == 0, ids, train.IGNORED)
    assert train.loss_of(model, ids, labels).item() == pytest.approx(model(ids, labels=labels).loss.item(), rel=1e-2)


def test_the_rate_rises_stays_and_falls() -> None:
    """Linear at both ends, never zero."""
    rates = [train.schedule(step, 1000) for step in range(1000)]
    assert rates[0] == 1 / train.WARM_UP
    assert rates[train.WARM_UP : 400] == [1.0] * (400 - train.WARM_UP)
    assert 0 < rates[-1] < 0.01
    assert rates[400:] == sorted(rates[400:], reverse=True)


def test_two_steps_of_the_script(
    tmp_path: Path, threads_kept: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes the final and the early model, which differ and load, and says how good it is."""
    monkeypatch.setattr(train, "BATCH", 2)
    options = ["--steps", "2", "--early-step", "1", "--every", "2", "--questions", "2", "--threads", "1"]
    assert train.main(["--out", str(tmp_path), *options]) == 0
    early, final = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("early", "final")
    )
    assert not torch.equal(early.lm_head.weight, final.lm_head.weight)
    assert "step 2" in (said := capsys.readouterr().out)
    assert said.count("wrong tool: calls 0.0%, answers 0.0%, follows 0.0%") == 2
