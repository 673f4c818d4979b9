"""Tokenizers without torch.

transformers' `AutoTokenizer` pulls torch in (770 MB and 4 to 6 s per process); `PreTrainedTokenizerFast` does the same
work in about 125 MB and 1 s. It is used wherever the model has a `tokenizer.json`; a probe text hashed by every process
shows whether two of them tokenize differently.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zagent.alive import busy

Result = TypeVar("Result")

#: Spaces, digits, case, accents, CJK, an emoji of several code points, newlines: where tokenizers differ.
PROBE_TEXT = "The  quick\tbrown fox 1234567890 — naïve café, 你好世界, 👩‍💻!\n\n  def f(x):\n    return x**2  # <|end|>"

#: One thread: tokenizers are not safe to share between several, and one keeps the event loop free all the same.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


async def in_tokenizer_thread(function: Callable[[], Result]) -> Result:
    """Run ``function()`` in the thread that owns the process's tokenizer. One that takes long (a template that loops, a
    reply of 10 MB) keeps everybody waiting, and is a lag of the process."""

    def work() -> Result:
        with busy("the tokenizer's thread"):
            return function()

    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def load_tokenizer(path: str, *, auto: bool = False, trust_remote_code: bool = False) -> Any:
    """The tokenizer at ``path`` (directory or hub id), light unless ``auto`` or no fast file is there."""
    if not auto and (not os.path.isdir(path) or os.path.exists(os.path.join(path, "tokenizer.json"))):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def probe(tokenizer: Any) -> str:
    """Hash of how ``tokenizer`` encodes the probe text, of its special ids and of its chat template."""
    facts = [
        list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
        list(tokenizer.encode(PROBE_TEXT)),
        tokenizer.eos_token_id,
        str(getattr(tokenizer, "chat_template", None)),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
