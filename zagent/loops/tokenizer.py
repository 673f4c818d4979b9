"""Tokenizers without torch, and mostly without transformers.

transformers' `AutoTokenizer` pulls torch in (770 MB and 4 to 6 s per process); its `PreTrainedTokenizerFast` does the
same work in 30 MB and 2 s more than `light_tokenizer`, which is used wherever the model's files say nothing that it
does not understand. A probe text hashed by every process shows whether two of them tokenize differently.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from zagent.alive import busy
from zagent.loops.light_tokenizer import open_light

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
        return open_light(path, partial(_load_fast, path)) or _load_fast(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _load_fast(path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def probe(tokenizer: Any) -> str:
    """Hash of how ``tokenizer`` encodes the probe text, of its special ids and of its chat template."""
    facts = [
        list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
        list(tokenizer.encode(PROBE_TEXT)),
        tokenizer.eos_token_id,
        str(getattr(tokenizer, "chat_template", None)),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
