"""`tool_agent`: the contract's state machine and limits, sentence by sentence, on scripted answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

import zagent
from support.scripted_llm import ScriptedLLM
from zagent.config import MultiTurnConfig, RolloutConfig
from zagent.errors import InputError, PromptTooLong, TemplateError
from zagent.loops.base import TrainerConfig
from zagent.loops.tool import ToolAgentLoop, check_choice
from zagent.loops.tools import Toolbox, ToolContext
from zagent.tiny.tokenizer import build
from zagent.types import AgentLoopOutput, TokenOutput

TOKENIZER = build()
PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]
CALLED: list[Any] = []


@zagent.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    CALLED.append((a, b))
    return a + b


@zagent.tool
def shout(text: str) -> str:
    """Say it louder."""
    CALLED.append(text)
    return text.upper()


@zagent.tool
def fail() -> str:
    """Never works."""
    raise ValueError("no luck")


@zagent.tool
def remember(context: ToolContext) -> tuple[str, float]:
    """Tell what it knows."""
    seen = context.trajectory_data.setdefault("calls", 0)
    context.trajectory_data["calls"] += 1
    return f"{seen} {context.attempt} {context.row_key} {context.row['uid']}", 0.5


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Run:
    """One row on scripted answers."""

    def __init__(
        self,
        *answers: str | TokenOutput,
        params: dict[str, Any] | None = None,
        context: int | None = None,
        row: dict[str, Any] | None = None,
        response_length: int = 1000,
        prompt_length: int = 1000,
        messages: list[dict[str, Any]] | None = None,
        tokenizer: Any = TOKENIZER,
        **limits: Any,
    ) -> None:
        CALLED.clear()
        self.params = {"logprobs": True, "temperature": 1.0} if params is None else params
        self.llm = ScriptedLLM(tokenizer, *answers)
        turns = MultiTurnConfig(
            tools=tuple(f"{__name__}.{name}" for name in ("add", "shout", "fail", "remember")), **limits
        )
        rollout = RolloutConfig(response_length=response_length, prompt_length=prompt_length, multi_turn=turns)
        loop = ToolAgentLoop(TrainerConfig(rollout, context), self.llm, tokenizer)  # type: ignore[arg-type]
        loop.tools, loop.session, loop.attempt, loop.row_key = Toolbox.load(turns), "the-session", 3, "5/u7/1"
        columns = {"raw_prompt": PROMPT if messages is None else messages, "uid": "u7", **(row or {})}
        self.schemas = loop.tools.schemas
        self.output: AgentLoopOutput = asyncio.run(loop.run(self.params, **columns))

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.output.extra_fields["messages"]
        return messages

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.messages]

    @property
    def rendering(self) -> list[int]:
        """The whole conversation, rendered at once."""
        ids: list[int] = TOKENIZER.apply_chat_template(
            self.messages, tools=self.schemas, tokenize=True, return_dict=False
        )
        return ids

    def told(self) -> list[str]:
        """What tools answered."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]


def test_a_call_is_run_and_its_result_told() -> None:
    """After one round the history is user, assistant with its call, tool, assistant; four turns (pitfalls E5, C8)."""
    run = Run(call("add", a=2, b=3), "It is 5.")
    assert CALLED == [(2, 3)]
    assert run.roles == ["user", "assistant", "tool", "assistant"]
    asked, told = run.messages[1]["tool_calls"][0], run.messages[2]
    assert asked["function"]["name"] == "add"
    assert json.loads(asked["function"]["arguments"]) == {"a": 2, "b": 3}
    assert (told["content"], told["tool_call_id"]) == ("5", asked["id"])
    assert run.output.num_turns == 4


def test_without_a_call_there_are_two_turns() -> None:
    """User and assistant."""
    run = Run("Five.")
    assert run.output.num_turns == 2
    assert run.roles == ["user", "assistant"]
    assert list(run.output.response_mask) == [1] * 6


def test_tokens_equal_the_full_rendering_and_the_mask_counts_what_was_sampled() -> None:
    """Three answers with two rounds of tools: ids as rendered at once, but for the end that follows the last answer."""
    run = Run(call("add", a=2, b=3), "Let me see.\n" + call("shout", text="hi"), "It is 5 and HI.")
    ids = [*run.output.prompt_ids, *run.output.response_ids]
    assert run.rendering[: len(ids)] == ids
    assert TOKENIZER.decode(run.rendering[len(ids) :]) == "\n"
    mask = np.asarray(run.output.response_mask) == 1
    assert list(np.asarray(run.output.response_ids)[mask]) == run.llm.sampled
    assert list(np.asarray(run.output.response_logprobs)[mask]) == [-(i + 1) for i in range(len(run.llm.sampled))]
    assert not np.asarray(run.output.response_logprobs)[~mask].any()


def test_each_prompt_begins_with_the_one_before_and_its_answer() -> None:
    """Bit for bit, and what was sent is not changed afterwards (pitfalls C1, C13)."""
    run = Run(call("add", a=2, b=3), call("add", a=5, b=5), "Ten.")
    sampled = 0
    for before, after in zip(run.llm.asked, run.llm.asked[1:], strict=False):
        start = len(before.seen)
        answer = after.seen[start : after.seen.index(TOKENIZER.eos_token_id, start) + 1]
        assert after.seen[:start] == before.seen
        assert answer == run.llm.sampled[sampled : sampled + len(answer)]
        sampled += len(answer)
        assert list(before.prompt) == before.seen


def test_one_session_for_the_trajectory() -> None:
    """Sticky: every call has the row's session."""
    run = Run(call("add", a=2, b=3), "Five.")
    assert [asked.session for asked in run.llm.asked] == ["the-session"] * 2


def test_sampling_params_are_not_changed_and_every_turn_asks_for_log_probabilities() -> None:
    """Each call gets a dict of its own (pitfall D4)."""
    run = Run(call("add", a=2, b=3), call("add", a=1, b=1), "Done.")
    assert run.params == {"logprobs": True, "temperature": 1.0}
    assert [asked.given["logprobs"] for asked in run.llm.asked] == [True] * 3
    assert [asked.params for asked in run.llm.asked] == [asked.given for asked in run.llm.asked]


def test_each_turn_may_sample_what_the_response_leaves() -> None:
    """R less all that is in it, tool tokens included (pitfall D2)."""
    run = Run(call("add", a=2, b=3), "Five.", response_length=400)
    first, second = run.llm.asked
    assert first.given["max_new_tokens"] == 400
    assert second.given["max_new_tokens"] == 400 - (len(second.seen) - len(first.seen))


def test_the_callers_limit_holds_for_each_turn() -> None:
    """min(caller's, R − response so far, context − prompt − reserve)."""
    run = Run(call("add", a=2, b=3), "Five.", params={"max_tokens": 90})
    assert [asked.given["max_new_tokens"] for asked in run.llm.asked] == [90, 90]
    room = len(run.llm.asked[1].seen) + 8 + 25
    again = Run(call("add", a=2, b=3), "Five.", context=room)
    assert again.llm.asked[1].given["max_new_tokens"] == 25


@pytest.mark.parametrize("spare", [0, -5])
def test_no_room_in_the_context_ends_the_loop_without_a_call(spare: int) -> None:
    """Zero or less is never sent (pitfall D5)."""
    length = len(Run(call("add", a=2, b=3), "Five.").llm.asked[1].seen)
    run = Run(call("add", a=2, b=3), context=length + 8 + spare)
    assert len(run.llm.asked) == 1
    assert run.roles == ["user", "assistant", "tool"]
    assert run.output.num_turns == 3


def test_a_full_response_stops_before_its_calls_are_run() -> None:
    """The answer ends exactly at R."""
    text = call("add", a=2, b=3)
    length = len(TOKENIZER.encode(text)) + 1
    run = Run(text, response_length=length)
    assert CALLED == []
    assert len(run.output.response_ids) == length


@pytest.mark.parametrize(("limits", "rounds"), [({"max_assistant_turns": 1}, 0), ({"max_assistant_turns": 2}, 1),
                                                ({"max_user_turns": 1}, 1), ({"max_user_turns": 2}, 2)])  # fmt: skip
def test_the_limits_of_turns_stop_after_the_answer_that_reaches_them(limits: dict[str, int], rounds: int) -> None:
    """The answer is kept, its calls are not run."""
    run = Run(*[call("add", a=i, b=0) for i in range(4)], **limits)
    assert [(i, 0) for i in range(rounds)] == CALLED
    assert run.roles == ["user", "assistant", *["tool", "assistant"] * rounds]
    assert run.output.num_turns == 2 + 2 * rounds


def test_a_call_cut_off_by_length_is_not_run() -> None:
    """Not a half one, and not a whole one in an answer that was cut."""
    for text in ('<tool_call>\n{"name": "add", "argum…', call("add", a=2, b=3) + "…"):
        run = Run(text, params={"max_new_tokens": len(text)})
        assert CALLED == []
        assert run.roles == ["user", "assistant"]


def test_an_abort_ends_the_trajectory() -> None:
    """It never passes for a finished turn, and nothing in it is run (pitfall K29)."""
    ids = np.array(TOKENIZER.encode(call("add", a=2, b=3)), np.int32)
    run = Run(TokenOutput(ids, np.zeros(len(ids), np.float32), "abort"))
    assert CALLED == []
    assert list(run.output.response_ids) == list(ids)


def test_calls_beyond_the_limit_are_answered_and_counted_but_not_run() -> None:
    """`max_parallel_calls` = 1 by default; the history stays paired by id (pitfalls E6, E14)."""
    run = Run(call("add", a=1, b=1) + "\n" + call("add", a=2, b=2), "Two.")
    assert CALLED == [(1, 1)]
    ids = [asked["id"] for asked in run.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in run.messages if message["role"] == "tool"] == ids
    assert run.output.metrics.tool_calls_skipped == 1
    assert run.output.metrics.tool_calls_ok == 1


def test_parallel_calls_are_answered_in_order_of_the_calls() -> None:
    """Paired by id."""
    text = "\n".join([call("add", a=1, b=1), call("shout", text="x"), call("add", a=2, b=2)])
    run = Run(text, "Done.", max_parallel_calls=3)
    assert run.told() == ["2", "X", "4"]
    assert run.output.extra_fields["tool_rewards"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("fail"), "no luck"),
        (call("nothing"), "unknown tool 'nothing'"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "not a JSON object"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', "JSON"),
        (call("add", a="x", b=1), "add"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(text: str, said: str) -> None:
    """A tool message says so, reward 0.0, and the loop goes on."""
    run = Run(text, "I see.")
    assert said in run.told()[0]
    assert run.output.extra_fields["tool_rewards"] == [0.0]
    assert run.output.metrics.tool_calls_failed == 1
    assert run.roles[-1] == "assistant"


def test_a_result_that_fits_exactly_is_appended_and_ends_the_trajectory() -> None:
    """One token less of room, and nothing of it is appended (pitfall D7)."""
    free = Run(call("add", a=2, b=3), "Five.")
    whole = len(free.llm.asked[1].seen) - len(free.llm.asked[0].seen)
    exact = Run(call("add", a=2, b=3), response_length=whole)
    assert len(exact.output.response_ids) == whole
    assert list(exact.output.response_mask).count(0) > 0
    assert exact.roles == ["user", "assistant", "tool"]
    short = Run(call("add", a=2, b=3), response_length=whole - 1)
    assert list(short.output.response_mask) == [1] * len(short.llm.sampled)
    assert short.roles == ["user", "assistant"]
    assert len(exact.llm.asked) == len(short.llm.asked) == 1


def test_results_are_cut_to_characters() -> None:
    """`max_tool_response_length`, whatever their tokens are (pitfall D11)."""
    run = Run(call("shout", text="字" * 30), "Long.", max_tool_response_length=10, tool_response_truncate_side="right")
    assert run.told() == ["字" * 10 + "...(truncated)"]


def test_tools_know_their_trajectory() -> None:
    """The row, its key, the attempt, and what other calls of the trajectory left behind; their rewards are carried."""
    run = Run(call("remember"), call("remember"), "Enough.")
    assert run.told() == ["0 3 5/u7/1 u7", "1 3 5/u7/1 u7"]
    assert run.output.extra_fields["tool_rewards"] == [0.5, 0.5]


def test_the_prompt_shows_the_tools() -> None:
    """Unless the prompt describes them itself."""
    assert '"name": "add"' in TOKENIZER.decode(Run("Hi.").llm.asked[0].seen)
    assert "add" not in TOKENIZER.decode(Run("Hi.", tools_in_template=False).llm.asked[0].seen)


def test_a_prompt_beyond_its_length_fails_the_row() -> None:
    """Tools' schemas count (pitfall D12)."""
    with pytest.raises(PromptTooLong):
        Run("Hi.", prompt_length=50)


def test_a_template_that_takes_no_tools_is_named() -> None:
    """Before anything is sampled; the model would never have seen them."""
    plain = build()
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(TemplateError, match="tools_in_template"):
        Run("Hi.", tokenizer=plain)


def test_generating_time_is_left_to_the_engine_calls() -> None:
    """The worker sums it; tools' time is the loop's."""
    run = Run(call("add", a=2, b=3), "Five.")
    assert run.output.metrics.generate_sequences == 0
    assert run.output.metrics.tool_calls > 0


@pytest.mark.parametrize("column", ["add", 5, [1, "add"], {"add": 1}])
def test_a_choice_that_is_no_list_of_names_is_refused(column: Any) -> None:
    """Or the row would run with all tools."""
    with pytest.raises(InputError, match="column tools must be a list of names"):
        Run("Hi.", row={"tools": column})


def test_a_choice_among_no_tools_is_refused() -> None:
    """A forgotten `rollout.imports`, say; schemas are the business of other loops, and [] chooses none."""
    with pytest.raises(InputError, match="no tool is configured"):
        check_choice(["add"], None)
    for column in (None, [], [{"type": "function"}]):
        check_choice(column, None)
