"""One answer out of what several engines told of it, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zagent.client.continuing import Continuing, may_continue, pack_piece
from zagent.types import TokenOutput

PROMPT = np.array([1, 2, 3], np.int32)
IMAGES = [np.array([9], np.uint8)]
Span = tuple[int, int, int]


def part(ids: list[int], versions: list[Span] | None = None, *, log_probs: bool = True, **fields: Any) -> TokenOutput:
    """Tokens whose log-probabilities are a tenth of their ids, negative."""
    values = np.array(ids, np.float32) / -10 if log_probs else None
    spans = [(0, 0, len(ids))] if versions is None else versions
    return TokenOutput(np.array(ids, np.int32), values, versions=spans, **fields)


class OneCall(Continuing):
    """With the argument of its last attempt."""

    def __init__(self, argument: list[Any]) -> None:
        super().__init__(len(argument[0]), argument[1].get("max_new_tokens"))
        self._argument = argument

    def renew(self, argument: Any = None) -> list[Any] | None:
        renewed = super().renew(self._argument if argument is None else argument)
        self._argument = renewed or self._argument
        return renewed

    def broken_off(self, output: TokenOutput) -> Any:
        """As the client has it: the argument of each further call is made from the one of the last."""
        self._argument = self.aborted(output, self._argument)
        return self._argument


def continuing(**params: Any) -> OneCall:
    return OneCall([PROMPT, {"top_p": 0.5, **params}, IMAGES, None])


def test_a_call_that_has_told_nothing_is_sent_as_it_was() -> None:
    """Without a piece the argument stays, and the answer is the last engine's, untouched."""
    call, answer = continuing(max_new_tokens=10), part([5, 6])
    assert call.renew() is None
    assert call.whole(answer) is answer


def test_the_next_attempt_goes_on_where_the_last_one_was() -> None:
    """The tokens told of are added to the prompt and taken off the limit; all else stays, and the caller's own dict is
    not changed."""
    params = {"max_new_tokens": 10, "temperature": 0.5}
    call = OneCall([PROMPT, params, IMAGES, None])
    call.take(pack_piece(0, part([5, 6])))
    call.take(pack_piece(2, part([7])))
    ids, sent, images, videos = call.renew()
    assert (ids.dtype, ids.tolist()) == (np.int32, [1, 2, 3, 5, 6, 7])
    assert (sent, images, videos) == ({"max_new_tokens": 7, "temperature": 0.5}, IMAGES, None)
    assert (params, PROMPT.tolist()) == ({"max_new_tokens": 10, "temperature": 0.5}, [1, 2, 3])


def test_parts_of_several_attempts_become_one_answer() -> None:
    """Three engines, in the order in which they sampled; reason, preemptions and routed experts are the last one's."""
    call = continuing(max_new_tokens=10)
    call.take(pack_piece(0, part([5, 6])))
    call.renew()
    call.take(pack_piece(0, part([7])))
    assert call.renew()[0].tolist() == [1, 2, 3, 5, 6, 7]
    experts = np.zeros((7, 1, 1), np.int16)
    answer = call.whole(part([8, 9], stop_reason="length", num_preempted=2, routed_experts=experts))
    assert (answer.token_ids.dtype, answer.token_ids.tolist()) == (np.int32, [5, 6, 7, 8, 9])
    assert answer.log_probs.dtype == np.float32
    assert answer.log_probs.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.8, -0.9])
    assert (answer.stop_reason, answer.num_preempted, answer.routed_experts) == ("length", 2, experts)


def test_pieces_after_the_last_attempt_began_are_in_its_answer() -> None:
    """What the answering engine had told of on the way is not there twice."""
    call = continuing()
    call.take(pack_piece(0, part([5, 6])))
    call.renew()
    call.take(pack_piece(0, part([7])))
    assert call.whole(part([7, 8])).token_ids.tolist() == [5, 6, 7, 8]


def test_an_attempt_that_told_nothing_keeps_what_was_given() -> None:
    """The third attempt has the argument of the second."""
    call = continuing()
    call.take(pack_piece(0, part([5])))
    assert call.renew() is not None
    assert call.renew() is None
    assert call.whole(part([6])).token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(("starts", "kept"), [((1,), []), ((0, 2, 3), [5]), ((0, 0), [5]), ((0, 1, 3), [5, 6])])
def test_pieces_with_a_gap_are_not_used(starts: tuple[int, ...], kept: list[int]) -> None:
    """A message was lost, or came twice: what came before it stays, and nothing else."""
    call = continuing()
    for number, start in enumerate(starts):
        call.take(pack_piece(start, part([5 + number])))
    argument = call.renew()
    assert (argument[0].tolist()[3:] if argument else []) == kept


@pytest.mark.parametrize(("size", "limit"), [(4, 1), (5, None), (6, None)])
def test_one_token_at_least_is_left_to_sample(size: int, limit: int | None) -> None:
    """No engine is asked for 0 tokens: a piece that would exhaust the limit of 5 is not used."""
    call = continuing(max_new_tokens=5)
    call.take(pack_piece(0, part(list(range(size)))))
    argument = call.renew()
    assert (None if argument is None else argument[1]["max_new_tokens"]) == limit


def test_the_limit_counts_over_all_attempts() -> None:
    """The second engine is given 2 of 5 tokens; a piece of all its 2 is not used, one of 1 is."""
    call = continuing(max_new_tokens=5)
    call.take(pack_piece(0, part([5, 6, 7])))
    assert call.renew()[1]["max_new_tokens"] == 2
    call.take(pack_piece(0, part([8, 9])))
    assert call.renew() is None
    call.take(pack_piece(0, part([8])))
    assert call.renew()[1]["max_new_tokens"] == 1


def test_a_call_that_was_broken_off_goes_on_from_all_its_tokens() -> None:
    """Also from those that were not told of; again and again, with one limit over all. The caller's own are not
    changed."""
    params = {"max_new_tokens": 10, "temperature": 0.5}
    call = OneCall([PROMPT, params, IMAGES, None])
    call.take(pack_piece(0, part([5])))
    ids, sent, images, videos = call.broken_off(part([5, 6, 7], stop_reason="abort"))
    assert (ids.dtype, ids.tolist()) == (np.int32, [1, 2, 3, 5, 6, 7])
    assert (sent, images, videos) == ({"max_new_tokens": 7, "temperature": 0.5}, IMAGES, None)
    ids, sent, *_ = call.broken_off(part([8], [(4, 0, 1)], stop_reason="abort"))
    assert (ids.tolist(), sent["max_new_tokens"]) == ([1, 2, 3, 5, 6, 7, 8], 6)
    answer = call.whole(part([9], [(4, 0, 1)], stop_reason="length"))
    assert (answer.token_ids.tolist(), answer.versions) == ([5, 6, 7, 8, 9], [(0, 0, 3), (4, 3, 5)])
    assert answer.log_probs.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.8, -0.9])
    assert (answer.stop_reason, params, PROMPT.tolist()) == (
        "length",
        {"max_new_tokens": 10, "temperature": 0.5},
        [1, 2, 3],
    )


def test_losses_and_aborts_may_come_in_any_order() -> None:
    """An engine is lost, its heir is told to stop, another one is lost: each begins where the last one was."""
    call = continuing(max_new_tokens=9)
    call.take(pack_piece(0, part([5])))
    assert call.renew()[0].tolist() == [1, 2, 3, 5]
    call.take(pack_piece(0, part([6])))
    assert call.broken_off(part([6, 7], stop_reason="abort"))[0].tolist() == [1, 2, 3, 5, 6, 7]
    call.take(pack_piece(0, part([8])))
    ids, sent, *_ = call.renew()
    assert (ids.tolist(), sent["max_new_tokens"]) == ([1, 2, 3, 5, 6, 7, 8], 5)
    assert call.broken_off(part([], [], stop_reason="abort"))[0].tolist() == ids.tolist()
    assert call.whole(part([9])).token_ids.tolist() == [5, 6, 7, 8, 9]


def test_an_abort_without_a_token_changes_nothing() -> None:
    """The same argument again; what pieces had told is in the answer, if at all."""
    call = continuing(max_new_tokens=5)
    first = [PROMPT, {"top_p": 0.5, "max_new_tokens": 5}, IMAGES, None]
    assert call.aborted(part([], [], stop_reason="abort"), first) is first
    assert call.whole(part([5])).token_ids.tolist() == [5]


def test_an_abort_at_the_limit_leaves_nothing_to_sample() -> None:
    """The engine is asked for 0 tokens, and says why the answer ends; ends and limits are its to judge."""
    call = continuing(max_new_tokens=2)
    assert call.broken_off(part([5, 6], stop_reason="abort"))[1]["max_new_tokens"] == 0
    answer = call.whole(part([], [], stop_reason="length"))
    assert (answer.token_ids.tolist(), answer.stop_reason, answer.versions) == ([5, 6], "length", [(0, 0, 2)])


@pytest.mark.parametrize(
    "changed", [{"frequency_penalty": 0.5}, {"stop": ["x"]}, {"regex": "a*"}, {"min_new_tokens": 3}]
)
def test_an_aborted_call_that_looks_back_starts_afresh(changed: dict[str, Any]) -> None:
    """It would go on differently: the argument is the first one, and nothing of the aborted answer is kept."""
    call = continuing(max_new_tokens=5, **changed)
    ids, sent, *_ = call.broken_off(part([5, 6], routed_experts=np.zeros((4, 1, 1), np.int16), stop_reason="abort"))
    assert (ids.tolist(), sent["max_new_tokens"]) == ([1, 2, 3], 5)
    experts = np.ones((5, 1, 1), np.int16)
    answer = call.whole(part([7, 8, 9], [(1, 0, 3)], routed_experts=experts))
    assert (answer.token_ids.tolist(), answer.versions) == ([7, 8, 9], [(1, 0, 3)])
    assert (answer.routed_experts == 1).all()


def rows(count: int, value: int) -> np.ndarray:
    return np.full((count, 2, 1), value, np.int16)


def test_routed_experts_are_those_of_each_tokens_first_way_through_the_model() -> None:
    """Later engines go through all tokens again, under other weights: only the rows of their own tokens are taken, and
    the one of the token before, which has not been through the model until then."""
    call = continuing(max_new_tokens=9)
    call.broken_off(part([5, 6], stop_reason="abort", routed_experts=rows(4, 1)))
    call.broken_off(part([7], stop_reason="abort", routed_experts=rows(5, 2)))
    answer = call.whole(part([8, 9], routed_experts=rows(7, 3)))
    assert answer.routed_experts.dtype == np.int16
    assert answer.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 3, 3]


def test_rows_that_an_engine_did_not_give_are_the_next_ones() -> None:
    """A lost engine tells of none, and an aborted call may lack them."""
    call = continuing(max_new_tokens=9)
    call.take(pack_piece(0, part([5])))
    call.renew()
    call.broken_off(part([6], stop_reason="abort", routed_experts=rows(4, 1)))
    call.broken_off(part([7], stop_reason="abort"))
    answer = call.whole(part([8], routed_experts=rows(6, 3)))
    assert answer.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 3, 3]
    assert call.whole(part([], [], stop_reason="abort")).routed_experts is None


@pytest.mark.parametrize("params", [{}, {"max_new_tokens": None}])
def test_without_a_limit_there_is_none_later(params: dict[str, Any]) -> None:
    """The engine goes on to the end of the context, which is the same place."""
    call = continuing(**params)
    call.take(pack_piece(0, part([5])))
    assert call.renew()[1] == {"top_p": 0.5, **params}


@pytest.mark.parametrize(
    ("told", "rest", "whole"),
    [
        ([(0, 0, 2)], [(0, 0, 2)], [(0, 0, 4)]),
        ([(0, 0, 2)], [(1, 0, 2)], [(0, 0, 2), (1, 2, 4)]),
        ([(0, 0, 1), (1, 1, 2)], [(1, 0, 1), (2, 1, 2)], [(0, 0, 1), (1, 1, 3), (2, 3, 4)]),
        ([(1, 0, 2)], [(0, 0, 2)], [(1, 0, 2), (0, 2, 4)]),
    ],
)
def test_version_spans_are_moved_and_joined(told: list[Span], rest: list[Span], whole: list[Span]) -> None:
    """They cover the whole answer without a gap; neighbours of one version are one span."""
    call = continuing()
    call.take(pack_piece(0, part([5, 6], told)))
    call.renew()
    assert call.whole(part([7, 8], rest)).versions == whole


def test_log_probabilities_only_where_they_were_asked_for() -> None:
    """None in the parts is None in the whole."""
    call = continuing()
    call.take(pack_piece(0, part([5], log_probs=False)))
    call.renew()
    assert call.whole(part([6], log_probs=False)).log_probs is None


def test_an_answer_without_a_token_of_its_own_keeps_the_others() -> None:
    """The last engine aborted the call before it ran: reason abort, and what was there."""
    call = continuing()
    call.take(pack_piece(0, part([5])))
    call.renew()
    answer = call.whole(part([], [], stop_reason="abort"))
    assert (answer.token_ids.tolist(), answer.versions, answer.stop_reason) == ([5], [(0, 0, 1)], "abort")
    assert answer.log_probs.tolist() == pytest.approx([-0.5])


@pytest.mark.parametrize(("cached", "counted"), [(2, 2), (3, 3), (4, 3)])
def test_only_tokens_of_the_prompt_count_as_cached(cached: int, counted: int) -> None:
    """Three tokens of prompt; the fourth is the answer's, though it was the last engine's prompt."""
    call = continuing()
    call.take(pack_piece(0, part([5])))
    call.renew()
    assert call.whole(part([6], cached_tokens=cached)).cached_tokens == counted


def test_the_expanded_prompt_ends_where_the_answer_begins() -> None:
    """With images the engine says which ids it saw: without the tokens told of; the rest of the extra fields stays."""
    call = continuing()
    call.take(pack_piece(0, part([5, 6])))
    call.renew()
    seen = np.array([1, 2, 2, 2, 3, 5, 6], np.int32)
    answer = call.whole(part([7], cached_tokens=7, extra_fields={"prompt_token_ids": seen, "other": 1}))
    assert answer.extra_fields["prompt_token_ids"].tolist() == [1, 2, 2, 2, 3]
    assert (answer.extra_fields["other"], answer.cached_tokens) == (1, 5)


@pytest.mark.parametrize(
    "params",
    [
        *({key: 0.5} for key in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        *({key: "x"} for key in ("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex")),
        *({"min_new_tokens": 1}, {"stop": ["a"]}, {"custom_params": {}}, {"custom_logit_processor": "x"}),
        *({"repetition_penalty": 0}, {"presence_penalty": -1}, {"watermark": {"key": 1}}),
    ],
)
def test_calls_that_look_back_start_afresh(params: dict[str, Any]) -> None:
    """Penalties, grammars, stop strings and the least length would be other ones after a continuation."""
    assert not may_continue({"temperature": 1.0, **params})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "logit_bias": {"5": 1.0}, "sampling_seed": 3},
        {"max_new_tokens": 5, "stop_token_ids": [1], "ignore_eos": True, "logprobs": True},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "min_new_tokens": 0},
        dict.fromkeys(("frequency_penalty", "stop", "regex", "min_new_tokens", "custom_params")),
    ],
)
def test_calls_that_do_not_look_back_may_go_on(params: dict[str, Any]) -> None:
    """Also where such a parameter is there, but off."""
    assert may_continue(params)
