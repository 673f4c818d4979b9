"""`check_logprobs` says yes to what belongs together, and finds each way in which batch and model do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from support.outcomes import failed
from support.sampled_batch import PROMPT, RESPONSE, VOCABULARY, after_a_step, outcome, sampled_batch, tiny_model
from zagent.data_proto import DataProto
from zagent.errors import InputError, LogprobMismatch
from zagent.trainer.check import LogprobCheck, LogprobStatistics, check_logprobs
from zagent.trainer.collate import collate
from zagent.trainer.logprobs import response_logprobs


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def the_problem(check: LogprobCheck) -> str:
    (problem,) = check.problems
    return problem


def test_what_was_sampled_from_the_model_agrees(model: Any) -> None:
    """All tokens, with ratios of one, and the sentence says so without a complaint."""
    batch = sampled_batch([model])
    check = check_logprobs(batch, model, version=0)
    assert check.ok
    assert check.total.tokens == int(batch.batch["response_mask"].sum())
    assert check.total.max_difference < 1e-4
    assert check.total.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert (check.rows, check.rows_off, check.total.outside) == (12, 0, 0.0)
    assert "OFF" not in str(check)
    check.raise_for_problems()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_temperature_is_part_of_the_distribution(model: Any, temperature: float) -> None:
    """Said rightly it agrees; left out, every row is off."""
    batch = sampled_batch([model], temperature=temperature)
    assert check_logprobs(batch, model, temperature=temperature).ok
    wrong = check_logprobs(batch, model)
    assert wrong.rows_off == wrong.rows
    assert "another temperature" in the_problem(wrong)


def test_greedy_rows_have_plain_log_probabilities(model: Any) -> None:
    """At temperature 0 engines give log_softmax of the logits as they are."""
    assert check_logprobs(sampled_batch([model], temperature=0.0), model, temperature=0.0).ok


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_shifted_by_one_is_found(model: Any, by: int) -> None:
    """By the log-probabilities that are left without it, and by those that are none."""
    batch = sampled_batch([model])
    batch.batch["response_mask"] = batch.batch["response_mask"].roll(by, dims=1)
    check = check_logprobs(batch, model)
    assert check.problems[0].endswith("response_mask 0: the mask does not fit the tokens (shifted by one?)")
    assert check.rows_off == check.rows


def test_a_loop_that_shifts_its_mask_is_found(model: Any) -> None:
    """Where log-probabilities were cut to the wrong mask, only the differences tell."""
    rows = [outcome(i, model) for i in range(12)]
    for row in rows:
        assert row.output is not None
        row.output.response_mask = [0, *row.output.response_mask[:-1]]
    check = check_logprobs(collate(rows), model)
    assert check.rows_off == check.rows == 12


@pytest.mark.parametrize(("by", "where"), [(1, "before"), (-1, "after")])
def test_trainers_log_probabilities_shifted_by_one_are_named(model: Any, by: int, where: str) -> None:
    """The trainer's own gather at the wrong position: it is told in which direction."""
    batch = sampled_batch([model])
    own = response_logprobs(model, batch)
    assert check_logprobs(batch, own).ok
    assert f"belong to the one {where} it" in the_problem(check_logprobs(batch, own.roll(by, dims=1)))


def test_engines_on_old_weights_are_found(model: Any) -> None:
    """One step of training that never reached them: all rows are off, though they claim the new version."""
    check = check_logprobs(sampled_batch([model], version=4), after_a_step(model), version=4)
    assert check.rows_off == check.rows
    assert "other weights than the trainer's" in the_problem(check)
    with pytest.raises(LogprobMismatch, match="other weights than the trainer's"):
        check.raise_for_problems()


def test_one_engine_on_old_weights_is_found(model: Any) -> None:
    """The rows of one engine are off, the other's agree, and both are counted."""
    trained = after_a_step(model)
    check = check_logprobs(sampled_batch([model, trained]), trained)
    assert (check.rows, check.rows_off) == (12, 6)
    assert "6 of 12 rows are off" in the_problem(check)
    assert "an engine that samples from other weights than its peers" in the_problem(check)


def test_an_older_version_is_found_by_its_number(model: Any) -> None:
    """Where the engines say themselves that they have not got the new weights."""
    problem = the_problem(check_logprobs(sampled_batch([model], version=3), model, version=4))
    assert "sampled by weight version 3, not 4: weights that were not pushed" in problem


def test_older_rows_of_another_version_are_not_held_against_the_newest(model: Any) -> None:
    """Without a version only the newest is judged; each has its statistics."""
    trained = after_a_step(model)
    rows = [outcome(i, model if i < 4 else trained, version=7 if i < 4 else 8) for i in range(12)]
    check = check_logprobs(collate(rows, prompt_length=PROMPT, response_length=RESPONSE), trained)
    assert check.ok
    assert check.rows == 8
    assert check.by_version[8].max_difference < 1e-4
    assert check.by_version[7].mean_difference > 1e-3
    assert "version 7" in str(check)
    assert check.total.tokens == sum(one.tokens for one in check.by_version.values())


def test_a_row_that_saw_an_update_is_not_judged(model: Any) -> None:
    """Its later tokens may rest on a cache of the older weights, as they do after an update in place."""
    trained = after_a_step(model)
    row = outcome(0, model, version=8)
    assert row.output is not None
    row.output.extra_fields["rollout_versions"][0] = 7
    check = check_logprobs(collate([row, outcome(1, trained, version=8)]), trained)
    assert check.ok
    assert check.rows == 1
    assert check.by_version[8].mean_difference > 1e-3


def test_failed_rows_are_passed_over(model: Any) -> None:
    """All padding: neither tokens nor a NaN."""
    rows = [failed(0), *(outcome(i, model) for i in range(1, 4))]
    check = check_logprobs(collate(rows, prompt_length=PROMPT, response_length=RESPONSE), model)
    assert check.ok
    assert check.rows == 3


def test_a_batch_without_sampled_tokens_is_not_in_order(model: Any) -> None:
    """Nothing to compare is not agreement."""
    batch = sampled_batch([model])
    for key in ("response_mask", "rollout_log_probs"):
        batch.batch[key].zero_()
    assert the_problem(check_logprobs(batch, model)) == "the batch has no sampled token"


def test_not_a_number_is_found(model: Any) -> None:
    """A comparison with it is never true: it must not pass for agreement."""
    batch = sampled_batch([model])
    own = response_logprobs(model, batch)
    own[3, 0] = math.nan
    check = check_logprobs(batch, own)
    assert check.rows_off == 1
    assert check.total.outside == pytest.approx(1 / check.total.tokens)


def test_some_rows_are_enough(model: Any) -> None:
    """As many as asked for, not every n-th, and the same again."""
    batch = sampled_batch([model, after_a_step(model)], rows=24)
    checks = [check_logprobs(batch, model, max_rows=8) for _ in range(2)]
    assert checks[0] == checks[1]
    assert checks[0].rows == 8
    assert 0 < checks[0].rows_off < 8


def test_the_model_is_left_as_it_was(model: Any) -> None:
    """It is looked at without dropout and without gradients, and is in training again afterwards."""
    training = tiny_model().train()
    assert check_logprobs(sampled_batch([model]), training).ok
    assert training.training
    assert all(weight.grad is None for weight in training.parameters())


def test_what_cannot_be_compared_is_refused(model: Any) -> None:
    """No log-probabilities, or such of another shape, or images."""
    batch = sampled_batch([model])
    with pytest.raises(InputError, match=r"\(12, 3\), the batch's are \(12, 14\)"):
        check_logprobs(batch, torch.zeros(12, 3))
    del batch.batch["rollout_log_probs"]
    with pytest.raises(InputError, match="calculate_log_probs is false"):
        check_logprobs(batch, model)
    seen = sampled_batch([model])
    seen.batch["position_ids"] = seen.batch["position_ids"][:, None].repeat(1, 4, 1)
    with pytest.raises(InputError, match="images"):
        check_logprobs(seen, model)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"temperature": -1.0}, "temperature is a number of at least 0, got -1.0"),
        ({"temperature": math.nan}, "temperature is a number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature is a number of at least 0, got inf"),
        ({"temperature": None}, "temperature is a number of at least 0, got None"),
        ({"tolerance": -1e-4}, "tolerance is a number of at least 0, got -0.0001"),
        ({"tolerance": math.nan}, "tolerance is a number of at least 0, got nan"),
        ({"max_rows": -1}, "max_rows is a whole number of at least 1, or None, got -1"),
        ({"max_rows": 0}, "max_rows is a whole number of at least 1, or None, got 0"),
        ({"max_rows": 2.0}, "max_rows is a whole number of at least 1, or None, got 2.0"),
        ({"version": "0"}, "version is a whole number of at least 0, or None, got '0'"),
        ({"version": True}, "version is a whole number of at least 0, or None, got True"),
    ],
    ids=str,
)
def test_numbers_that_say_nothing_are_refused(model: Any, changed: dict[str, Any], match: str) -> None:
    """By name and value."""
    with pytest.raises(InputError, match=match):
        check_logprobs(sampled_batch([model]), model, **changed)


@pytest.mark.parametrize("wrong", [None, np.zeros((12, 14), np.float32), "tiny"], ids=["None", "numpy", "text"])
def test_what_is_no_model_is_refused(model: Any, wrong: Any) -> None:
    """By its type, with what it could be."""
    with pytest.raises(InputError, match=rf"torch.Tensor\), got {type(wrong).__name__}"):
        check_logprobs(sampled_batch([model]), wrong)


def test_a_model_of_another_vocabulary_is_refused(model: Any) -> None:
    """Before it looks a token up that it has not got."""
    batch = sampled_batch([model])
    batch.batch["input_ids"][0, -1] = VOCABULARY + 3
    with pytest.raises(InputError, match=rf"has token {VOCABULARY + 3}, the model knows {VOCABULARY}"):
        check_logprobs(batch, model)


@pytest.mark.parametrize("wrong", [None, {"rollout_log_probs": 1}], ids=["None", "dict"])
def test_what_is_no_batch_is_refused(model: Any, wrong: Any) -> None:
    """By its type."""
    with pytest.raises(InputError, match=rf"a batch is a zagent.DataProto, got {type(wrong).__name__}"):
        check_logprobs(wrong, model)


@pytest.mark.parametrize("key", ["rollout_versions", "response_mask", "prompts", "input_ids", "position_ids"])
def test_a_batch_that_lacks_something_is_refused(model: Any, key: str) -> None:
    """By name."""
    batch = sampled_batch([model])
    del batch.batch[key]
    with pytest.raises(InputError, match=f"the batch has no {key}"):
        check_logprobs(batch, model)


def test_statistics_are_those_of_the_ratio() -> None:
    """By hand: differences of 0 and ln 2."""
    found = LogprobStatistics.of(torch.tensor([0.0, math.log(2.0)]), tolerance=0.1)
    assert (found.tokens, found.outside) == (2, 0.5)
    assert [found.ratio_mean, found.ratio_std, found.ratio_min, found.ratio_max] == pytest.approx([1.5, 0.5, 1, 2])
    assert [found.mean_difference, found.max_difference] == pytest.approx([math.log(2) / 2, math.log(2)])


def test_log_probabilities_do_not_depend_on_the_padding(model: Any) -> None:
    """Wider columns and other rows beside it change nothing, and padding has none."""
    rows = [outcome(i, model) for i in range(3)]
    narrow = response_logprobs(model, collate(rows))
    wide: DataProto = collate(rows, prompt_length=20, response_length=narrow.shape[1] + 9)
    found = response_logprobs(model, wide)
    torch.testing.assert_close(found[:, : narrow.shape[1]], narrow, atol=1e-5, rtol=1e-5)
    assert not found[wide.batch["attention_mask"][:, 20:] == 0].any()
