"""What a chat template writes between an answer and the messages after it. Text only; ids are in `tokens`.

A history rendered again is another history: templates strip earlier reasoning, move tools, trim. So new messages are
rendered behind a dummy conversation whose answer can be found again; what follows it is what has to be inserted:

    <|im_start|>user⏎zagentuser<|im_end|>⏎<|im_start|>assistant⏎zagentanswer │ <|im_end|>⏎ │ <|im_start|>user⏎…
                                  the dummy                                  │    close    │ the new messages
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cachetools import LRUCache

from zagent.errors import TemplateError
from zagent.loops.dummies import ANSWER, PROBE, USER, Exchange, Message, exchanges, shape, with_probes

logger = logging.getLogger(__name__)

Tools = list[dict[str, Any]] | None

#: Qwen3 and others write empty reasoning into the last answer only.
_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*|\s+")


@dataclass(frozen=True, slots=True)
class Seam:
    """Where an answer ends before messages of one shape."""

    #: Which of `exchanges` the template takes.
    way: int
    #: What stands between the dummy's answer and the new messages: the rest of its call, if it has one, and `close`.
    rest: str
    #: Terminator and tail of a turn, `<|im_end|>⏎`; empty where the next header ends it (GLM-4).
    close: str


class Seams:
    """Renders with one template and finds its seams, once per shape of messages.

    Args:
        tokenizer: transformers' tokenizer.
        options: the template's keyword arguments, given on every rendering.
        name: how errors call the template.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], name: str) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._name = name
        self._found: LRUCache[Any, Seam] = LRUCache(256)
        self._checked: LRUCache[Any, bool] = LRUCache(256)

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens that the tokenizer cuts out of a text before anything else, by id."""
        return {int(token_id): str(token) for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.added.values()), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "(?!)")

    def begins_added(self, text: str) -> bool:
        """``text`` begins with an added token."""
        return self._added_pattern.match(text) is not None

    def last_added(self, text: str) -> tuple[int, int]:
        """Start and end of the last added token in ``text``; (0, 0) without one."""
        spans = [match.span() for match in self._added_pattern.finditer(text)]
        return spans[-1] if spans else (0, 0)

    def render(self, messages: Sequence[Message], tools: Tools, **options: Any) -> str:
        """The conversation as the template writes it.

        Raises:
            TemplateError: it raised; with its own words.
        """
        options = {"add_generation_prompt": True, **self._options, **options}
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=False, **options)
            )
        except Exception as error:  # whatever the template's code raises
            raise self._error(messages, f"it refused: {error}") from error

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        """A whole conversation, with no text dropped (an assistant's may be: reasoning, text beside calls).

        Raises:
            TemplateError: the template refuses the messages, drops a text, or takes no tools.
        """
        text = self.render(messages, tools)
        key = (shape(messages), bool(tools))
        if key not in self._checked:
            if tools and self.render(messages, None) == text:
                hint = "rollout.multi_turn.tools_in_template=false leaves them to the prompt's own text"
                raise self._error(messages, f"it takes no tools; {hint}")
            probes, roles = with_probes(messages)
            kept = {probe: role for probe, role in roles.items() if role != "assistant"}
            self._check_kept(messages, kept, self.render(probes, tools))
            self._checked[key] = True
        return text

    def append(self, messages: Sequence[Message], tools: Tools) -> tuple[Seam, str]:
        """The seam before ``messages``, and the text behind it, with the generation prompt.

        Raises:
            TemplateError: the template refuses the messages, drops a text, or is not append-only.
        """
        if not messages:
            raise self._error(messages, "there is no message to append")
        key = (shape(messages), repr(tools))
        seam = self._found.get(key) or self._find(messages, tools)
        way, text = self._written(seam, messages, tools)
        if not text.startswith(seam.rest):  # the rest of a call may tell its id (Mistral)
            seam = self._find(messages, tools)
            way, text = self._written(seam, messages, tools)
        if not text.startswith(seam.rest):
            raise self._not_append_only(way, seam.rest, text)
        self._found[key] = seam
        return seam, text[len(seam.rest) :]

    def _written(self, seam: Seam, messages: Sequence[Message], tools: Tools) -> tuple[Exchange, str]:
        """``messages`` as they go behind the dummy, and what is written after its answer."""
        answer = _unused(ANSWER, repr((messages, tools)))
        way = list(exchanges(messages, answer))[seam.way]
        return way, self._behind(answer, way, tools)

    def _find(self, messages: Sequence[Message], tools: Tools) -> Seam:
        """The first way that the template takes. If there is none: what is wrong with it, else its own words."""
        probes, roles = with_probes(messages, blanks=True)
        refusals: list[TemplateError] = []
        for number, way in enumerate(exchanges(probes)):
            try:
                seam = self._seam(number, way, roles, tools)
            except TemplateError as error:
                refusals.append(error)
                continue
            if "tool" in roles.values() and all(message.get("role") != "tool" for message in way.new):
                logger.warning("%s; tool results go as user messages", refusals[0])
            return seam
        as_given = refusals[: len(refusals) // 2]  # the other half says the same in parts
        raise next((error for error in as_given if error.__cause__ is None), refusals[0])

    def _seam(self, number: int, way: Exchange, roles: Mapping[str, str], tools: Tools) -> Seam:
        text = self._behind(ANSWER, way, tools)
        self._check_head(way, tools)
        self._check_kept([*way.dummy, *way.new], roles, text)
        ends = list(self._ends(way.dummy, tools))
        for rest in ends:
            if text.startswith(rest):
                return Seam(number, rest, self._close(way, rest, tools))
        raise self._not_append_only(way, ends[0], text)

    def _check_head(self, way: Exchange, tools: Tools) -> None:
        """What stands before the new messages must not change with them. Tools may move (Mistral)."""
        heads = [self._heads(way, shown) for shown in ([tools, None] if tools else [None])]
        if not any(alone == grown for alone, grown in heads):
            raise self._not_append_only(way, *heads[0])

    def _heads(self, way: Exchange, tools: Tools) -> tuple[str, str]:
        alone = self.render(way.dummy, tools, add_generation_prompt=False)
        grown = self.render([*way.dummy, *way.new], tools)
        heads = (_EMPTY_REASONING.sub(" ", text.rpartition(ANSWER)[0]) for text in (alone, grown))
        return next(heads), next(heads)

    def _ends(self, dummy: list[Message], tools: Tools) -> Iterator[str]:
        """What follows the last answer of a conversation: first as it is when more is to come, for some templates end
        it differently (Phi-3 adds eos, gpt-oss writes `<|return|>`)."""
        ended = Exchange(dummy, [], dummy)
        with suppress(TemplateError):  # no generation prompt after an answer
            end = self._behind(ANSWER, ended, tools, add_generation_prompt=True)
            yield end.removesuffix(self._header(dummy[:1]))
        yield self._behind(ANSWER, ended, tools, add_generation_prompt=False)

    def _close(self, way: Exchange, rest: str, tools: Tools) -> str:
        """The end of ``rest`` that closes the turn, not the call."""
        if way.dummy == way.plain:
            return rest
        closes = self._ends(way.plain, tools)
        return next((close for close in closes if rest.endswith(close)), rest[self.last_added(rest)[0] :])

    def _header(self, question: list[Message]) -> str:
        """The generation prompt."""
        asked = Exchange(question, [], question)
        more, end = (self._behind(USER, asked, None, add_generation_prompt=more) for more in (True, False))
        if more.startswith(end):
            return more.removeprefix(end)
        pieces, others = self._added_pattern.split(more), self._added_pattern.split(end)
        return "".join(pieces[_common(pieces, others) :])

    def _behind(self, mark: str, way: Exchange, tools: Tools, **options: Any) -> str:
        """What is written after ``mark``, a text of the dummy's."""
        _, found, tail = self.render([*way.dummy, *way.new], tools, **options).rpartition(mark)
        if not found:
            raise self._error([*way.dummy, *way.new], "it drops the text of earlier messages")
        return tail

    def _check_kept(self, messages: Sequence[Message], roles: Mapping[str, str], text: str) -> None:
        starts, lengths = [found.start() for found in re.finditer(PROBE, text)], {len(probe) for probe in roles}
        present = {text[start : start + length] for start in starts for length in lengths}
        dropped = {role for probe, role in roles.items() if probe not in present}
        if dropped:
            raise self._error(messages, f"it drops the text of role {', '.join(sorted(dropped))}")

    def _not_append_only(self, way: Exchange, alone: str, grown: str) -> TemplateError:
        start = max(_common(alone, grown) - 10, 0)
        before, after = (repr(text[start : start + 40]) for text in (alone, grown))
        reason = (
            f"it is not append-only: {before} becomes {after} when a message of role {way.new[0].get('role')} follows"
        )
        return self._error([*way.dummy, *way.new], reason)

    def _error(self, messages: Iterable[Message], reason: str) -> TemplateError:
        roles = ", ".join(str(message.get("role")) for message in messages)
        return TemplateError(f"chat template of {self._name} (roles: {roles}): {reason}")


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many first items are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _unused(word: str, text: str) -> str:
    """``word``, longer if ``text`` has it."""
    while word in text:
        word += "x"
    return word
