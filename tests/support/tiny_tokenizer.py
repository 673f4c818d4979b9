"""A byte-level tokenizer with a chat template, made on the spot: no hub, no file in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: ChatML, as the Qwen family writes it.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if shout is defined and shout %}!{% endif %}"
)


def tiny_tokenizer() -> Any:
    """256 bytes and three special tokens: one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def saved_tokenizer(directory: Path) -> str:
    """Its directory."""
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)
