"""Token ids of conversations that grow: what was sampled stays as it is, and only what is new is rendered."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from cachetools import LRUCache

from zagent.errors import TemplateError
from zagent.loops.dummies import Message
from zagent.loops.seams import Seams, Tools
from zagent.types import Ids

#: Ends a turn of some models whose configuration does not say so (SGLang stops at it, too).
EXTRA_STOP_TOKENS = ("<|eom_id|>",)


class ChatTemplate:
    """The chat template of a tokenizer. For one thread; `of` keeps what is found out for the rows to come.

    Args:
        tokenizer: transformers' tokenizer.
        options: the template's keyword arguments, given on every call (`rollout.apply_chat_template_kwargs`).
        name: the model's path, and how errors call the template; default: where the tokenizer was loaded from.
        stop_ids: tokens that end an answer; default: `stop_token_ids`.
    """

    _shared: ClassVar[LRUCache[Any, ChatTemplate]] = LRUCache(16)

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        name: str = "",
        stop_ids: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._name = name or str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
        self._seams = Seams(tokenizer, dict(options or {}), self._name)
        self.stop_ids = frozenset(stop_token_ids(tokenizer, name) if stop_ids is None else stop_ids)

    @classmethod
    def of(cls, tokenizer: Any, options: Mapping[str, Any], name: str = "") -> ChatTemplate:
        """The same object for the same tokenizer, options and name."""
        key = (tokenizer, repr(sorted(options.items())), name)
        if key not in cls._shared:
            cls._shared[key] = cls(tokenizer, options, name)
        return cls._shared[key]

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a whole conversation with the generation prompt, as the tokenizer's own `apply_chat_template` gives.

        Raises:
            TemplateError: the template refuses the messages, drops the text of a role other than the assistant, or
                takes no tools.
        """
        return self._encode(self._seams.prompt(messages, tools))

    def continuation(self, sampled: Ids, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids between an answer and the next one: what its turn lacks, ``messages``, the generation prompt.

        Tools that a template shows beside the *last* user message (Mistral) are shown again with a user's reply. Where
        the template has no tool role, tool results are one user message.

        Args:
            sampled: the answer's ids. If its terminator was not sampled (length, a stop string) the turn is closed;
                another token that ends an answer stands for the terminator.
            messages: tool results, with `name` and `tool_call_id` if the template wants them; a user's reply.
            tools: the schemas that `prompt` was given.

        Raises:
            TemplateError: the template refuses the messages, drops a text, or is not append-only.
        """
        seam, new = self._seams.append(messages, tools)
        last = int(sampled[-1]) if len(sampled) else -1
        token = self._seams.added.get(last, "")
        if not seam.close and token and new.startswith(token):  # the next header ended the answer (GLM-4)
            return self._encode_behind(token, new.removeprefix(token))
        return self._encode_behind(token, self._lacking(seam.close, last, token) + new)

    def fragment(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of ``messages`` amid a conversation, with the generation prompt: no system prompt that the template adds,
        nothing of the answer before. Raises as `continuation`."""
        seam, new = self._seams.append(messages, tools)
        start, end = self._seams.last_added(seam.close)
        return self._encode_behind(seam.close[start:end] if end == len(seam.close) else "", new)

    def _lacking(self, close: str, last: int, token: str) -> str:
        """What an answer lacks of ``close``, whose last token is ``last``, the added token ``token``."""
        if token and token in close:
            return close[close.index(token) + len(token) :]
        return close[self._seams.last_added(close)[1] :] if last in self.stop_ids else close

    def _encode_behind(self, token: str, text: str) -> list[int]:
        """Ids of ``text`` as they are behind the added token ``token``: some tokenizers write a text's first word
        differently. Behind other tokens ("") the text counts as a new beginning, for what was sampled stays whole."""
        if not text or self._seams.begins_added(text):
            return self._encode(text)
        token = token or str(self._tokenizer.eos_token or "")
        head, ids = self._encode(token), self._encode(token + text)
        if len(head) > 1 or ids[: len(head)] != head:
            raise TemplateError(
                f"chat template of {self._name}: {text[:40]!r} has no tokens of its own behind {token!r}, so the "
                "conversation cannot be continued token by token"
            )
        return ids[len(head) :]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def stop_token_ids(tokenizer: Any, model_path: str = "") -> set[int]:
    """Ids that end an answer: the tokenizer's eos, those that the files of model and tokenizer name, and
    `EXTRA_STOP_TOKENS`."""
    added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    found: list[int | None] = [tokenizer.eos_token_id, *(added.get(token) for token in EXTRA_STOP_TOKENS)]
    for path in {str(tokenizer.name_or_path or ""), model_path} - {""}:
        found += _named(Path(path))
    return {int(token_id) for token_id in found if token_id is not None}


def _named(directory: Path) -> list[int | None]:
    """`eos_token_id` (one or a list) of the configuration files; none where there are no files, as for a hub id."""
    ids: list[int | None] = []
    for file in (directory / "generation_config.json", directory / "config.json"):
        named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ids += named if isinstance(named, list) else [named]
    return ids
