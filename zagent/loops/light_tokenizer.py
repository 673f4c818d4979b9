"""A model's tokenizer without transformers, for as long as nobody asks it for more than ids, texts and chat templates.

Importing transformers takes one to two seconds of a core in every process, for it lists all installed packages and
reads each of its own 1 500 modules. What text rows need are `tokenizers`, which does the work there, too, and jinja2.
A model whose files ask for anything that transformers adds to these is left to transformers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

#: transformers' named special tokens, in its order.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Lists of further special tokens.
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
#: Keys of `tokenizer_config.json` that change neither ids nor texts (of those that begin texts, the file itself tells).
_HARMLESS = frozenset(
    (
        *("tokenizer_class", "backend", "model_max_length", "name_or_path", "is_local", "local_files_only"),
        *("add_bos_token", "add_eos_token", "add_prefix_space", "errors", "legacy", "model_input_names"),
        *("use_default_system_prompt", "sp_model_kwargs", "vocab_size", "processor_class", "use_fast"),
    )
)
#: Read by older tokenizers, where `added_tokens_decoder` is missing.
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
#: What makes `apply_chat_template` do more than write text: transformers' business.
_BEYOND = frozenset(
    (
        *("chat_template", "documents", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors"),
    )
)
_loading = threading.Lock()


def open_light(path: str, whole: Callable[[], Any]) -> LightTokenizer | None:
    """The tokenizer in the directory ``path``; None where only transformers' can be trusted to be right, or to say what
    is wrong. ``whole()`` loads that."""
    directory = Path(path)
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = _template(directory, config)
        if not _is_plain(directory, config):
            return None
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # missing or broken files, an unknown model: a panic of the Rust library is none of these
        return None
    special = {name: config[name] for name in NAMED if config.get(name) is not None}
    fits = _fits(backend, config, [*special.values(), *_further(config)])
    return LightTokenizer(path, backend, special, template, whole) if fits else None


class LightTokenizer:
    """Stands for transformers' tokenizer, and becomes it for good with the first request that is not answered here, so
    that whatever changes the tokenizer changes all of it.

    Args:
        path: its directory, which it calls `name_or_path`.
        backend: a `tokenizers.Tokenizer`.
        special: the named special tokens it has.
        template: the chat template; None = it has none.
        whole: loads transformers' tokenizer.
    """

    def __init__(
        self, path: str, backend: Any, special: Mapping[str, str], template: str | None, whole: Callable[[], Any]
    ) -> None:
        self.__dict__.update(
            _backend=backend,
            _special=dict(special),
            _load=whole,
            _whole=None,
            _own={
                "name_or_path": path,
                "chat_template": template,
                **dict.fromkeys((*NAMED, *(f"{name}_id" for name in NAMED))),
                **special,
                **{f"{name}_id": backend.token_to_id(token) for name, token in special.items()},
            },
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_own" not in self.__dict__:  # a protocol's, or a copy that is being made
            raise AttributeError(name)
        if self._whole is None and name in self._own:
            return self._own[name]
        return getattr(self.whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole(), name, value)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.whole()(*texts, **options)

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size()) if self._whole is None else len(self._whole)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"LightTokenizer({self._own['name_or_path']!r})" if self._whole is None else repr(self._whole)

    def whole(self) -> Any:
        """transformers' tokenizer, loaded by the first who asks."""
        if self._whole is None:
            with _loading:
                if self._whole is None:
                    self.__dict__["_whole"] = self._load()
        return self._whole

    @property
    def added_tokens_decoder(self) -> Any:
        """Tokens that are cut out of a text before anything else, by id."""
        return self._backend.get_added_tokens_decoder() if self._whole is None else self._whole.added_tokens_decoder

    def encode(self, text: Any, *pair: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Ids of ``text``; with what the model's texts begin and end with, unless told otherwise."""
        if self._whole is not None or pair or options or not isinstance(text, str):
            found: list[int] = self.whole().encode(text, *pair, add_special_tokens=add_special_tokens, **options)
            return found
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of ``token_ids`` (one, or a sequence)."""
        ids = _plain_ids(token_ids)
        if self._whole is not None or options or ids is None:
            return self.whole().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """``conversation`` as the chat template writes it; its ids, where ``tokenize`` and not ``return_dict``."""
        ours = self._whole is None and not (tokenize and return_dict) and not _BEYOND & options.keys()
        if not (ours and self._own["chat_template"] and _are_maps(conversation) and (not tools or _are_maps(tools))):
            given = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": tokenize}
            return self.whole().apply_chat_template(conversation, **given, return_dict=return_dict, **options)
        text = compiled(self._own["chat_template"]).render(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special, **options},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


@lru_cache(maxsize=16)  # not in the tokenizer, which may be pickled
def compiled(template: str) -> Any:
    """A chat template in the environment that transformers gives it: sandboxed, JSON not escaped for HTML."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _is_plain(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether transformers would do nothing with these files that is not done here."""
    template = _template(directory, config)
    told = {name: config.get(name) for name in (*NAMED, *_FURTHER, "added_tokens_decoder", "chat_template")}
    sides = (config.get("padding_side", "right"), config.get("truncation_side", "right"))
    known = {
        *told,
        *_HARMLESS,
        "padding_side",
        "truncation_side",
        "clean_up_tokenization_spaces",
        "split_special_tokens",
    }
    return (
        config.keys() <= known
        and all(told[name] is None or isinstance(told[name], str) for name in NAMED)
        and all(isinstance(token, str) for token in _further(config))
        and all(side in ("left", "right") for side in sides)
        and not config.get("clean_up_tokenization_spaces")
        and not config.get("split_special_tokens")
        and (template is None or (isinstance(template, str) and not re.search(r"\{%[-+]?\s*generation\b", template)))
        and not (directory / "additional_chat_templates").exists()
        and ("added_tokens_decoder" in config or not any((directory / name).exists() for name in _LEGACY_FILES))
    )


def _further(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a name; those in a map have names that templates see, and are none of ours."""
    lists = [config.get(name) or () for name in _FURTHER]
    return [token for tokens in lists for token in (tokens if isinstance(tokens, (list, tuple)) else [tokens])]


def _fits(backend: Any, config: Mapping[str, Any], special: Sequence[str]) -> bool:
    """Whether the backend has all ``special`` tokens as such, and the configuration names no others."""
    has = {token_id: _facts(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    marked = {token["content"] for token in has.values() if token["special"]}
    named = config.get("added_tokens_decoder") or {}
    return (
        backend.truncation is None
        and backend.padding is None
        and set(special) <= marked
        and all(has.get(int(token_id)) == token for token_id, token in named.items())
    )


def _facts(token: Any) -> dict[str, Any]:
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": token.content, **{name: getattr(token, name) for name in flags}}


def _plain_ids(ids: Any) -> list[int] | None:
    """``ids`` as a list of ints; None where they are something else."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, int):
        return [ids]
    plain = isinstance(ids, (list, tuple)) and all(isinstance(token, int) for token in ids)
    return list(ids) if plain else None


def _are_maps(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(value, dict) for value in values)
