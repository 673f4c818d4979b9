"""Text in, text out, for callers without this engine's tokenizer: a judge's, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zagent.errors import InvalidRequest
from zagent.loops.tokenizer import in_tokenizer_thread


class ChatTokenizer:
    """The model's tokenizer and chat template, in the tokenizer's thread; loaded by the first who asks."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer: Any = None

    async def encode(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        """Ids (int32) of ``messages`` and the generation prompt.

        Raises:
            InvalidRequest: the tokenizer cannot be loaded, has no template, or its template refuses the messages.
        """

        def work() -> list[int]:
            rendered = self._loaded().apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return list(rendered)

        try:
            return np.array(await in_tokenizer_thread(work), np.int32)
        except Exception as error:  # jinja's, transformers', the file system's
            raise InvalidRequest(f"chat cannot render these messages: {type(error).__name__}: {error}") from error

    async def decode(self, ids: np.ndarray) -> str:
        """Text without special tokens."""
        return await in_tokenizer_thread(lambda: str(self._loaded().decode(ids.tolist(), skip_special_tokens=True)))

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer
