"""Chat templates of known families: small ones of the same kind, each with what makes its family special.

A family's tokenizer is byte-level BPE whose merges know no borders between words, spaces and punctuation, so that text
cut in the wrong place gets other tokens; its special tokens have the real ones' names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


@dataclass(frozen=True)
class Family:
    """One template and what may be asked of it."""

    name: str
    #: Ends an answer.
    eos: str
    #: The template's other special tokens, and more that end an answer, as generation_config.json would say.
    special: str = ""
    stops: str = ""
    bos: str | None = None
    #: Shows tools to the model.
    takes_tools: bool = True
    #: Renders messages of role tool; else results are a user message.
    tool_role: bool = True
    #: Renders an assistant's `tool_calls`; else they are part of its text.
    calls: bool = True
    #: Arguments of calls as JSON text.
    text_arguments: bool = False
    #: Text beside calls.
    text_with_calls: bool = True
    #: Contents are lists of parts.
    parts: bool = False
    #: Its tokenizer splits words first: headers of plain text end at a token's border only then.
    words: bool = False

    @property
    def template(self) -> str:
        return (HERE / f"{self.name}.jinja").read_text().rstrip("\n")


FAMILIES = {
    family.name: family
    for family in (
        # A system prompt of its own; results of one round share a user turn.
        Family("qwen2_5", "<|im_end|>", "<|im_start|> <tool_call> </tool_call>", stops="<|endoftext|>"),
        # Writes empty reasoning into the last answer, strips that of earlier ones.
        Family("qwen3", "<|im_end|>", "<|im_start|> <think> </think>", stops="<|endoftext|>"),
        # Tools in the first user message, one call a turn, text beside it dropped, contents trimmed.
        Family(
            "llama3_1",
            "<|eot_id|>",
            "<|start_header_id|> <|end_header_id|> <|python_tag|>",
            bos="<|begin_of_text|>",
            stops="<|eom_id|>",
            text_with_calls=False,
        ),
        # Roles alternate, tools beside the last user message, ids of nine characters, text or calls, no header.
        Family(
            "mistral_v3",
            "</s>",
            "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
            bos="<s>",
            text_with_calls=False,
        ),
        # Roles alternate, no tools, the system message inside the first user message, contents trimmed.
        Family(
            "gemma3",
            "<end_of_turn>",
            "<start_of_turn>",
            bos="<bos>",
            stops="<eos>",
            takes_tools=False,
            tool_role=False,
            calls=False,
        ),
        # Arguments as text, system messages moved to the front, no header after results.
        Family(
            "deepseek_v3",
            "<｜end▁of▁sentence｜>",
            "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁sep｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
            "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
            "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
            bos="<｜begin▁of▁sentence｜>",
            takes_tools=False,
            text_arguments=True,
        ),
        # ChatML with a system prompt of its own; any role, no calls.
        Family("smollm2", "<|im_end|>", "<|im_start|>", stops="<|endoftext|>", takes_tools=False, calls=False),
        # An answer has no terminator: the model samples the next header.
        Family("glm4", "<|endoftext|>", "[gMASK] <sop> <|system|> <|assistant|>", stops="<|user|> <|observation|>"),
        # Without generation prompt eos is written at the end; results as JSON.
        Family(
            "phi4_mini",
            "<|end|>",
            "<|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|tool_call|> <|/tool_call|> <|tool_response|>",
            stops="<|endoftext|>",
        ),
        # Results need a name; a space before the terminator.
        Family("hermes3", "<|im_end|>", "<|im_start|>", bos="<|begin_of_text|>", text_with_calls=False),
        # Two tokens end a turn; roles alternate, no tools.
        Family(
            "command_r",
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> "
            "<|END_RESPONSE|>",
            bos="<BOS_TOKEN>",
            takes_tools=False,
            tool_role=False,
            calls=False,
        ),
        # Results name their call.
        Family(
            "kimi_k2",
            "<|im_end|>",
            "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> "
            "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        ),
        # Calls and answers end differently, the last answer differently again; the date is the clock's.
        Family(
            "gpt_oss",
            "<|return|>",
            "<|start|> <|message|> <|channel|>",
            stops="<|call|> <|end|>",
            text_with_calls=False,
        ),
        # Headers are plain text.
        Family("vicuna", "</s>", bos="<s>", takes_tools=False, tool_role=False, calls=False, words=True),
        # Contents are lists of parts; headers are plain text.
        Family(
            "idefics3",
            "<end_of_utterance>",
            "<|im_start|> <image>",
            takes_tools=False,
            calls=False,
            parts=True,
            words=True,
        ),
    )
}


@cache
def tokenizer_of(name: str) -> Any:
    """A family's tokenizer, with its template."""
    family = FAMILIES[name]
    more = [*family.special.split(), *family.stops.split()]
    return make_tokenizer(family.template, family.eos, more, bos=family.bos, name=name, words=family.words)


def make_tokenizer(
    template: str,
    eos: str,
    more: Sequence[str] = (),
    *,
    bos: str | None = None,
    name: str = "mine",
    words: bool = False,
) -> Any:
    """Byte-level BPE, whose merges cross all borders unless ``words``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _texts(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([eos, *([bos] if bos else []), *more])
    if bos:
        pair = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[pair])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, chat_template=template, name_or_path=name
    )


def _texts() -> list[str]:
    """What contents look like: line breaks, brackets and quotes stand beside words, as merges must find them."""
    turns = ["user\n", "assistant\n", "\n\n", "tool\n", "\nUSER: ", " ASSISTANT:", "User:", "Assistant:", "\n", " "]
    words = [
        "What is 17 + 25?",
        '{"name": "add", "arguments": {"a": 1}}',
        "It is 42.",
        "]\n",
        '"}\n',
        "\n<tool_response>\n",
    ]
    return [turn + word + tail for turn in turns for word in words for tail in turns]


def sampled_calls(family: Family, text: str, number: int) -> dict[str, Any]:
    """An assistant message that calls `add`, as far as the family has calls."""
    arguments = {"a": number, "b": 25}
    if not family.calls:
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}, "b": 25}}}}\n</tool_call>'
        return {"role": "assistant", "content": f"{text}\n{call}"}
    function = {"name": "add", "arguments": json.dumps(arguments) if family.text_arguments else arguments}
    call = {"id": f"call0000{number % 10}", "type": "function", "function": function}
    return {"role": "assistant", "content": text if family.text_with_calls else "", "tool_calls": [call]}


def result(text: str, number: int) -> dict[str, Any]:
    """The tool's answer to call ``number``, as a loop hands it on."""
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number % 10}", "content": text}


def in_full(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` as one writes them for this family's template by hand."""
    return [_in_full(family, message) for message in messages]


def _in_full(family: Family, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool" and not family.tool_role:
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    return {**message, "role": role, "content": [{"type": "text", "text": content}] if family.parts else content}
