"""Tool calls as SGLang's parsers read them. No engine is needed, but SGLang is."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.engine import sglang_parsers
from zagent.engine.sglang_parsers import parse
from zagent.errors import ConfigError, InvalidRequest
from zagent.loops.parsers import FunctionCall, find_parser
from zagent.loops.parsers.sglang import SGLANG_FORMATS

pytest.importorskip("sglang")

PROPERTIES = {"a": {"type": "integer"}, "s": {"type": "string"}}
SCHEMAS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
]

#: A call of "{name}" with {"a": 1, "s": "x"}, as each format writes it.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "{name}", "arguments": {"a": 1, "s": "x"}}\n</tool_call>',
    "qwen25": '<tool_call>\n{"name": "{name}", "arguments": {"a": 1, "s": "x"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "{name}", "parameters": {"a": 1, "s": "x"}}',
    "mistral": '[TOOL_CALLS] [{"name": "{name}", "arguments": {"a": 1, "s": "x"}}]',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    '{"a": 1, "s": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    '{"a": 1, "s": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:7<|tool_call_argument_begin|>"
    '{"a": 1, "s": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function={name}>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "pythonic": '[{name}(a=1, s="x")]',
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.{name} "
    '<|constrain|>json<|message|>{"a": 1, "s": "x"}',
}


def written(format: str, name: str = "add") -> str:
    return WRITTEN[format].replace("{name}", name)


def test_the_names_are_sglangs() -> None:
    """All 44; workers know them without SGLang."""
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES

    assert sorted(SGLANG_FORMATS) == sorted(TOOL_CALL_PARSER_NAMES)
    assert len(set(SGLANG_FORMATS)) == 44


@pytest.mark.parametrize("format", WRITTEN)
def test_a_call_is_read(format: str) -> None:
    """One per format, with the arguments' types."""
    calls = parse(format, written(format), SCHEMAS)[1]
    assert [(name, error) for name, _, _, error in calls] == [("add", None)]
    assert json.loads(calls[0][1]) == {"a": 1, "s": "x"}


@pytest.mark.parametrize("schemas", [SCHEMAS, []], ids=["declared", "none"])
@pytest.mark.parametrize("format", WRITTEN)
def test_a_name_that_nobody_declared_does_not_vanish(format: str, schemas: list[dict[str, Any]]) -> None:
    """The model is to be told that there is no such tool."""
    calls = parse(format, written(format, "nope"), schemas)[1]
    assert [(name, error) for name, _, _, error in calls] == [("nope", None)]


@pytest.mark.parametrize("format", [one for one in SGLANG_FORMATS if one != "response_template"])
def test_text_without_a_call_is_content(format: str) -> None:
    """In every format."""
    assert parse(format, "just text", SCHEMAS) == ("just text", [])


def test_a_final_answer_of_gpt_oss_comes_back_as_it_was() -> None:
    """What its reader wants in front does not stay."""
    text = "<|channel|>final<|message|>four"
    assert parse("gpt-oss", text, SCHEMAS) == (text, [])


def test_ids_are_carried_through() -> None:
    """Kimi's, and Mistral's if it writes them; SGLang drops both."""
    assert parse("kimi_k2", written("kimi_k2"), SCHEMAS)[1][0][2] == "functions.add:7"
    own = written("mistral").replace('"x"}}', '"x"}, "id": "abcdef123"}')
    assert parse("mistral", own, SCHEMAS)[1][0][2] == "abcdef123"
    assert parse("mistral", written("mistral"), SCHEMAS)[1][0][2] == ""
    assert parse("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', SCHEMAS)[1] == [["add", '{"a": 1}', "", None]]


BROKEN = {
    "hermes": ('<tool_call>\n{"name": "half", "arguments": {\n</tool_call>', "half"),
    "qwen25": ('<tool_call>\n{"name": "half", "arguments": {\n</tool_call>', "half"),
    "llama3": ('<|python_tag|>{"name": "half", "parameters": {', "half"),
    "mistral": ('[TOOL_CALLS] [{"name": "half", "arguments": {]', "half"),
    "deepseekv3": (written("deepseekv3").replace('"a": 1', '"a": '), ""),
    "kimi_k2": (written("kimi_k2").replace("}", ""), ""),
    "gpt-oss": (written("gpt-oss").replace('"a": 1', '"a": '), ""),
}


@pytest.mark.parametrize("format", BROKEN)
def test_a_call_that_cannot_be_read_is_told(format: str) -> None:
    """Pitfall E2: SGLang drops it, or calls it text."""
    text, name = BROKEN[format]
    calls = parse(format, text, SCHEMAS)[1]
    subject = f"the call of '{name}'" if name else "a tool call"
    assert calls == [
        [name, "", "", f"Error: {subject} cannot be read: its arguments are incomplete or not valid ({format})"]
    ]


@pytest.mark.parametrize("format", ["qwen25", "kimi_k2"])
def test_the_siblings_of_a_broken_call_are_kept(format: str) -> None:
    """Where each call has a mark of its own."""
    text, name = BROKEN[format]
    both = written(format) + text
    assert [(one[0], one[3] is None) for one in parse(format, both, SCHEMAS)[1]] == [("add", True), (name, False)]


def test_a_mark_inside_an_argument_is_no_lost_call() -> None:
    """It is counted out."""
    text = written("qwen25").replace('"x"', '"<tool_call>"')
    assert [one[3] for one in parse("qwen25", text, SCHEMAS)[1]] == [None]


def test_a_reader_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Brackets nested without end: the call is told as broken."""
    caplog.set_level(logging.INFO)
    content, calls = parse("llama3", "<|python_tag|>" + '{"a": ' * 5000, SCHEMAS)
    assert [one[3] is not None for one in calls] == [True]
    assert "SGLang's parser 'llama3' failed on a turn: RecursionError" in caplog.text
    assert content.startswith("<|python_tag|>")


def test_a_format_that_is_none_is_refused() -> None:
    """And one that this model has no template for, and schemas that are none."""
    with pytest.raises(InvalidRequest, match=r"rollout.multi_turn.format='nope': Unsupported tool_call_parser: nope"):
        parse("nope", "", SCHEMAS)
    with pytest.raises(InvalidRequest, match="response_template is required"):
        parse("response_template", "", SCHEMAS)
    with pytest.raises(InvalidRequest, match="tool schemas that SGLang cannot read"):
        parse("llama3", "", [{"function": {}}])


def test_without_sglang_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated engine may run where SGLang is not installed."""
    monkeypatch.setitem(sys.modules, "sglang.srt.function_call.function_call_parser", None)
    sglang_parsers._sglang.cache_clear()
    try:
        with pytest.raises(ConfigError, match="SGLang's formats need the sglang extra"):
            parse("llama3", "", SCHEMAS)
    finally:
        sglang_parsers._sglang.cache_clear()


def test_an_engine_reads_for_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the pool, with its tokenizer, in a thread; a simulated one as well."""
    seen: list[Any] = []

    def reads(format: str, text: str, schemas: Any, tokenizer: Any) -> Any:
        seen.append(tokenizer)
        return parse(format, text, schemas, None)

    async def here(function: Any, *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(sglang_parsers, "parse", reads)
    monkeypatch.setattr(asyncio, "to_thread", here)  # virtual time knows no threads

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine()
            server.engine.tokenizer = "tokenizer"
            parser = find_parser("kimi_k2", await cluster.manager())
            turn = await parser.parse(written("kimi_k2"), SCHEMAS)
            assert turn.calls == [FunctionCall("add", '{"a": 1, "s": "x"}', "functions.add:7")]
            assert seen == ["tokenizer"]

    run(main())


@pytest.mark.parametrize(
    "argument", [None, [], ["llama3", "text"], ["llama3", 1, []], ["llama3", "text", None]], ids=repr
)
def test_an_argument_of_another_form_is_refused(argument: Any) -> None:
    """`InvalidRequest`: any peer may send it."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            with pytest.raises(InvalidRequest, match="parse_tool_calls takes"):
                await (await cluster.caller()).call("engine", "parse_tool_calls", argument)

    run(main())
