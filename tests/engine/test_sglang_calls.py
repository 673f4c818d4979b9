"""SGLang's forms of calls and answers, by hand-made dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zagent.engine import sglang_calls as calls
from zagent.engine.base import EngineInfo
from zagent.errors import EngineError, InvalidRequest, Overloaded
from zagent.types import TokenOutput

INFO = EngineInfo(vocab_size=100, context_length=64, reserved_tokens=5)


def strict(kind: type) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"expected {kind.__name__}")
        return value

    return convert


CONVERTERS: calls.Converters = {
    "max_new_tokens": strict(int),
    "temperature": float,
    "top_k": strict(int),
    "ignore_eos": strict(bool),
    "stop_token_ids": set,
    "logit_bias": strict(dict),
    "sampling_seed": strict(int),
}


def sampling(
    params: dict[str, Any], *, prompt_length: int = 10, keep_seed: bool = False
) -> tuple[dict[str, Any], bool]:
    return calls.to_sampling(params, prompt_length, INFO, CONVERTERS, keep_seed=keep_seed)


def reply(ids: list[int], reason: Any = "stop", **meta: Any) -> dict[str, Any]:
    """A finished answer as SGLang sends it, with log-probability -id/10 for each id."""
    full = {
        "id": "0" * 32,
        "finish_reason": {"type": reason} if isinstance(reason, str) else reason,
        "prompt_tokens": 10,
        "completion_tokens": len(ids),
        "cached_tokens": 7,
        "num_retractions": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [(-i / 10, i, None) for i in ids],
    }
    return {"text": "", "output_ids": ids, "meta_info": {**full, **meta}}


#: What SGLang sends for a call that was aborted before it ran.
ABORTED_IN_QUEUE = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "id": "0" * 32,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "0",
        "e2e_latency": 0.1,
        "completion_tokens": 0,
    },
}


class HttpError(Exception):
    """Shaped like fastapi.HTTPException."""

    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__()
        self.status_code, self.detail = status_code, detail


def test_caller_keeps_its_parameters() -> None:
    """The caller's dictionary is the same before and after."""
    params = {"logprobs": True, "temperature": 0.5, "sampling_seed": 3}
    sampling(params)
    assert params == {"logprobs": True, "temperature": 0.5, "sampling_seed": 3}


def test_logprobs_is_ours_and_not_sglangs() -> None:
    """`logprobs` is taken out and reported apart; it is off unless asked for."""
    assert sampling({"logprobs": True, "max_new_tokens": 4}) == ({"max_new_tokens": 4}, True)
    assert sampling({"max_new_tokens": 4})[1] is False


def test_logprobs_must_be_a_bool() -> None:
    """OpenAI's number of alternatives is refused instead of being read as true."""
    with pytest.raises(InvalidRequest, match="logprobs must be true or false, got 5"):
        sampling({"logprobs": 5})


@pytest.mark.parametrize(
    ("key", "near"), [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("seed", "sampling_seed")]
)
def test_unknown_key_names_the_nearest(key: str, near: str) -> None:
    """An unknown sampling key is refused with the nearest valid one."""
    with pytest.raises(InvalidRequest, match=f"'{key}' is unknown, did you mean '{near}'"):
        sampling({key: 1})


def test_token_limit_is_always_set_and_fits_the_context() -> None:
    """Without a limit, or with too large a one, the call asks for what the context leaves: 64 - 5 - 10 - 1."""
    assert sampling({})[0]["max_new_tokens"] == 48
    assert sampling({"max_new_tokens": 1000})[0]["max_new_tokens"] == 48
    assert sampling({"max_new_tokens": 3})[0]["max_new_tokens"] == 3


def test_none_means_default() -> None:
    """A parameter that is None is left to SGLang's default."""
    assert sampling({"temperature": None, "max_new_tokens": 2})[0] == {"max_new_tokens": 2}


@pytest.mark.parametrize(("keep_seed", "expected"), [(True, 9), (False, None)])
def test_seed_goes_only_where_it_is_honoured(keep_seed: bool, expected: int | None) -> None:
    """`sampling_seed` is dropped unless the engine samples by it."""
    assert sampling({"sampling_seed": 9}, keep_seed=keep_seed)[0].get("sampling_seed") == expected


@pytest.mark.parametrize(
    "params", [{"ignore_eos": "yes"}, {"top_k": 1.5}, {"temperature": "hot"}, {"max_new_tokens": -1}]
)
def test_wrong_value_names_key_and_value(params: dict[str, Any]) -> None:
    """A value that SGLang's scheduler could not decode is refused here: there it would kill the engine."""
    (key, value), *_ = params.items()
    with pytest.raises(InvalidRequest, match=f"{key}.*{value}"):
        sampling(params)


@pytest.mark.parametrize("token_id", [-1, 100])
def test_stop_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    """SGLang indexes its logits with them."""
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        sampling({"stop_token_ids": [5, token_id]})


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), float("-inf")])
def test_biases_must_be_finite(bias: float) -> None:
    """An infinite bias makes probabilities NaN, and the sampler dies of them."""
    with pytest.raises(InvalidRequest, match="logit_bias of token 5 must be finite"):
        sampling({"logit_bias": {"5": bias}})


def test_answer_is_mapped() -> None:
    """Ids become int32, log-probabilities float32 of the same length, and the counters are taken over."""
    output = calls.to_output(reply([4, 2], num_retractions=3), logprobs=True)
    assert output.token_ids.dtype == np.int32 and output.token_ids.tolist() == [4, 2]
    assert output.log_probs.dtype == np.float32
    np.testing.assert_allclose(output.log_probs, [-0.4, -0.2], rtol=1e-6)
    assert (output.stop_reason, output.cached_tokens, output.num_preempted) == ("stop", 7, 3)


def test_log_probabilities_are_absent_unless_asked_for() -> None:
    """Without `logprobs` the answer has None, whatever SGLang sent."""
    assert calls.to_output(reply([1]), logprobs=False).log_probs is None


def test_call_aborted_in_the_queue_is_an_empty_abort() -> None:
    """The answer to a call that never ran lacks most keys, and is an abort without tokens."""
    output = calls.to_output(ABORTED_IN_QUEUE, logprobs=True)
    assert output.stop_reason == "abort"
    assert len(output.token_ids) == len(output.log_probs) == 0
    assert (output.versions, output.cached_tokens, output.num_preempted) == ([], 0, None)


def test_aborted_call_keeps_its_tokens_but_for_the_last() -> None:
    """A running call that is aborted returns what it had, with log-probabilities. SGLang aborts before it looks whether
    the last token ends the answer: going on from there might go on after the end."""
    output = calls.to_output(
        reply([1, 2, 3], {"type": "abort", "message": "Aborted", "status_code": None}), logprobs=True
    )
    assert (output.stop_reason, output.token_ids.tolist(), len(output.log_probs)) == ("abort", [1, 2], 2)
    assert output.versions == [(0, 0, 2)]
    silent = calls.to_output(reply([1], "abort", output_token_logprobs=None), logprobs=False)
    assert (silent.token_ids.tolist(), silent.versions) == ([], [])


def test_aborted_call_loses_tokens_without_log_probabilities() -> None:
    """Where an abort cut the log-probabilities short, ids and versions are cut to the same length."""
    output = calls.to_output(reply([1, 2, 3], "abort", output_token_logprobs=[(-0.1, 1, None)]), logprobs=True)
    assert (output.token_ids.tolist(), len(output.log_probs), output.versions) == ([1], 1, [(0, 0, 1)])


def test_phantom_log_probability_is_dropped() -> None:
    """A log-probability without a token does not appear in the answer."""
    output = calls.to_output(reply([], "length", output_token_logprobs=[(-1.0, 4, None)]), logprobs=True)
    assert len(output.token_ids) == len(output.log_probs) == 0


@pytest.mark.parametrize("triples", [[], [(-0.1, 1, None)], [(-0.1, 1, None)] * 3])
def test_missing_log_probabilities_are_an_engine_error(triples: list[Any]) -> None:
    """A finished answer whose log-probabilities are not one per token is never passed on."""
    with pytest.raises(EngineError, match="log-probabilities for 2 tokens"):
        calls.to_output(reply([1, 2], output_token_logprobs=triples), logprobs=True)


def test_log_probabilities_of_other_tokens_are_an_engine_error() -> None:
    """The triples' own ids must be the sampled ones."""
    with pytest.raises(EngineError, match="other tokens"):
        calls.to_output(reply([1, 2], output_token_logprobs=[(-0.1, 1, None), (-0.2, 3, None)]), logprobs=True)


@pytest.mark.parametrize("reason", [None, {"type": "novel"}])
def test_unknown_reason_is_an_engine_error(reason: Any) -> None:
    """An answer without a reason that we know never passes for a finished turn."""
    with pytest.raises(EngineError, match="unknown reason"):
        calls.to_output(reply([1], reason if reason else {}), logprobs=True)


def test_versions_are_spans_over_the_tokens() -> None:
    """Tokens sampled before and after a weight update carry their versions."""
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    assert calls.to_output(reply([1, 2, 3], weight_versions=spans), logprobs=True).versions == [(3, 0, 2), (8, 2, 3)]


def test_version_of_an_answer_without_spans_is_the_engines() -> None:
    """Where spans are missing, the answer's single version covers all tokens."""
    assert calls.to_output(reply([1, 2], weight_versions=None, weight_version="5"), logprobs=True).versions == [
        (5, 0, 2)
    ]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "0", "start": 0, "end": 1}],
        [{"version": "0", "start": 1, "end": 2}],
        [{"version": "default", "start": 0, "end": 2}],
        [{"version": None, "start": 0, "end": 2}],
    ],
)
def test_tokens_without_a_version_are_an_engine_error(spans: list[Any]) -> None:
    """Every token has a weight version that is a number, or the answer is not passed on."""
    with pytest.raises(EngineError, match="versions"):
        calls.to_output(reply([1, 2], weight_versions=spans), logprobs=True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), InvalidRequest),
        (TypeError("bad"), InvalidRequest),
        (HttpError(400, "bad"), InvalidRequest),
        (HttpError(503, "bad"), Overloaded),
        (HttpError(500, "bad"), EngineError),
        (RuntimeError("bad"), EngineError),
    ],
)
def test_exceptions_are_mapped_by_whose_fault_they_are(error: Exception, kind: type[Exception]) -> None:
    """The caller's mistakes, a full queue and SGLang's own failures are told apart, and the text is kept."""
    found = calls.to_error(error)
    assert type(found) is kind
    assert "bad" in str(found)


def test_our_errors_pass_through() -> None:
    """A typed error stays the object that it is."""
    error = EngineError("x")
    assert calls.to_error(error) is error


def told(replies: list[dict[str, Any]], *, step: int = 2, logprobs: bool = True, version: int = 0) -> list[TokenOutput]:
    """What `Pieces` makes of a call's answers before the last."""
    found: list[TokenOutput] = []
    pieces = calls.Pieces(found.append, step, logprobs, version)
    for one in replies:
        assert not calls.is_last(one)
        pieces.look(one)
    return found


def growing(count: int, **meta: Any) -> dict[str, Any]:
    """An answer of ``count`` tokens to a streamed call that goes on."""
    return reply(list(range(5, 5 + count)), reason=None, weight_versions=None, **meta)


def test_pieces_are_what_is_new() -> None:
    """SGLang repeats all tokens so far, the first one at once: told are at least two at a time, each token once."""
    found = told([growing(n) for n in (1, 3, 4, 6)])
    assert [piece.token_ids.tolist() for piece in found] == [[5, 6, 7], [8, 9, 10]]
    assert [piece.log_probs.tolist() for piece in found] == [
        pytest.approx([-0.5, -0.6, -0.7]),
        pytest.approx([-0.8, -0.9, -1.0]),
    ]
    assert [piece.versions for piece in found] == [[(0, 0, 3)], [(0, 0, 3)]]
    assert {piece.token_ids.dtype for piece in found} == {np.dtype(np.int32)}


def test_pieces_do_not_change_with_sglangs_lists() -> None:
    """It hands out the lists that it goes on to extend."""
    answer = growing(2)
    (piece,) = told([answer])
    answer["output_ids"].append(99)
    answer["output_ids"][0] = 99
    assert piece.token_ids.tolist() == [5, 6]


def test_pieces_without_log_probabilities_have_none() -> None:
    """Where they were not asked for."""
    assert told([growing(2, output_token_logprobs=None)], logprobs=False)[0].log_probs is None


def test_tokens_whose_log_probabilities_have_not_come_wait() -> None:
    """They are in the next piece."""
    behind = growing(4)
    del behind["meta_info"]["output_token_logprobs"][2:]
    found = told([behind, growing(5)])
    assert [piece.token_ids.tolist() for piece in found] == [[5, 6], [7, 8, 9]]


def test_pieces_with_log_probabilities_of_other_tokens_are_an_engine_error() -> None:
    """As in whole answers."""
    with pytest.raises(EngineError, match="other tokens"):
        told([growing(2, output_token_logprobs=[(-0.1, 5, None), (-0.1, 5, None)])])


def test_pieces_end_where_the_weights_change() -> None:
    """Spans come with the last answer only: which tokens of a piece are the new weights' is not known before."""
    found = told(
        [growing(2, weight_version="7"), growing(5, weight_version="8"), growing(8, weight_version="8")], version=7
    )
    assert [(piece.token_ids.tolist(), piece.versions) for piece in found] == [([5, 6], [(7, 0, 2)])]
    assert told([growing(4, weight_version="8")], version=7) == []


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequest), (503, Overloaded), (500, EngineError)])
def test_a_refused_stream_is_an_error(status: int, kind: type[Exception]) -> None:
    """SGLang raises, unless the call is streamed: then its refusal is an answer."""
    refused = reply([], reason={"type": "abort", "message": "bad", "status_code": status, "err_type": None})
    assert calls.is_last(refused)
    with pytest.raises(kind, match="bad"):
        calls.to_output(refused, logprobs=True)
