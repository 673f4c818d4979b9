"""One token a byte, and a chat template of the Hermes kind that only ever appends."""

from __future__ import annotations

from typing import Any

PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: Single tokens that stay in decoded text.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")

#: Tools go into the system message; each tool result is a message of its own, so that no message changes one before it.
TEMPLATE = """\
{%- set system = messages and messages[0].role == 'system' -%}
{%- if tools or system -%}
{{- '<|im_start|>system\\n' -}}
{%- if system -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools -%}
{{- ('\\n' if system else '') + '<tools>\\n' -}}
{%- for tool in tools -%}{{- (tool.function or tool) | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{{- '\\n' if message.content or not loop.first -}}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role != 'system' -%}
{{- raise_exception('unknown role: ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build() -> Any:
    """A `PreTrainedTokenizerFast`: 256 bytes, three special tokens, six marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, chat_template=TEMPLATE, model_max_length=2048
    )
