"""A trainer's weights as a directory of safetensors under the names of the checkpoint that the engines started with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from zagent.errors import InputError

#: A directory of safetensors; a model with `save_pretrained`; or (name, tensor) pairs.
Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]] | Any"
Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
#: Left out of a checkpoint where it is the embedding.
TIED = "lm_head.weight"


def write_checkpoint(source: Source, directory: Path, reference: Path | None) -> Path:
    """Write ``source`` to ``directory`` (which appears whole or not at all), and check it; blocks. A ``source`` that is
    a directory is used where it lies.

    Args:
        reference: the engines' checkpoint. Names and shapes must be its: SGLang skips names that it does not know
            without a word, or dies of them. None, or without safetensors: any.

    Raises:
        InputError: names or shapes that differ; a source of another kind.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).resolve()
    else:
        draft = directory.with_name(directory.name + ".draft")
        draft.mkdir(parents=True, mode=0o700)
        try:
            _save(source, draft, reference)
            draft.rename(directory)
        except BaseException:
            shutil.rmtree(draft)
            raise
        path = directory
    try:
        check_checkpoint(path, reference)
    except InputError:
        if path == directory:
            shutil.rmtree(directory)
        raise
    return path


def _save(source: Any, directory: Path, reference: Path | None) -> None:
    if hasattr(source, "save_pretrained"):  # it gives the names of the checkpoint, where those in memory differ
        with _no_progress_bar():
            source.save_pretrained(directory)
        return
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _named(source, reference).items()}
    first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    # safetensors refuses two names of one tensor.
    whole = {n: tensor if first[tensor.data_ptr()] == n else tensor.clone() for n, tensor in tensors.items()}
    save_file(whole, directory / "w.safetensors")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Of transformers', which would be drawn at each step of a training."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _named(source: Any, reference: Path | None) -> dict[str, Any]:
    """Tensors by name, without the head where it is the embedding. Raises `InputError`."""
    pairs = source.items() if isinstance(source, Mapping) else source
    if not isinstance(pairs, Iterable):
        kind = type(source).__name__
        raise InputError(f"weights are a directory, a model with save_pretrained, or named tensors, not a {kind}")
    tensors: dict[str, Any] = {}
    for pair in pairs:
        name, tensor = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, pair)
        if not isinstance(name, str) or not hasattr(tensor, "detach"):
            raise InputError(
                f"weights are pairs of name and tensor, got a {type(tensor).__name__} (name: {name!r:.80})"
            )
        if name in tensors:
            raise InputError(f"weights have {name!r} twice")
        tensors[name] = tensor
    if _is_tied(reference):
        tensors.pop(TIED, None)
    return tensors


def tensors_of(source: Source, reference: Path | None) -> dict[str, Any]:
    """The tensors of ``source``, which is no directory, by name; checked as by `check_checkpoint`. A model's have the
    names of its `state_dict`."""
    if isinstance(source, (str, os.PathLike)):
        raise InputError(f"weights in a directory ({source}) are not broadcast: transport='disk'")
    named = source.state_dict() if hasattr(source, "state_dict") else source
    tensors = _named(named, reference)
    _check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, reference)
    return tensors


def check_checkpoint(path: Path, reference: Path | None) -> None:
    """Raises `InputError` where ``path`` has no safetensors, or others than ``reference`` by name or shape."""
    _check(shapes(path), reference)


def _check(found: Shapes, reference: Path | None) -> None:
    if not found:
        raise InputError("no weights: there is not a single tensor in safetensors")
    wanted = {} if reference is None else shapes(reference)
    if not wanted:
        return
    optional = {TIED} if _is_tied(reference) else set()
    _refuse("unknown to the engines' checkpoint", found.keys() - wanted.keys() - optional)
    _refuse("missing", wanted.keys() - found.keys() - optional)
    wrong = {n for n in found.keys() & wanted.keys() if found[n] != wanted[n]}
    _refuse("of another shape", {f"{name} {list(found[name])} instead of {list(wanted[name])}" for name in wrong})


def _refuse(what: str, names: set[str]) -> None:
    if names:
        some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise InputError(f"weights {what}: {some}")


def shapes(directory: Path) -> Shapes:
    """Of all tensors in its safetensors, read from the files' headers. Raises `InputError`."""
    from safetensors import SafetensorError, safe_open

    found: Shapes = {}
    for file in _files(directory):
        try:
            with safe_open(file, "numpy") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read: {error}") from error
    return found


def _files(directory: Path) -> list[Path]:
    """Those of the index, where there is one: beside them may lie the same weights in other people's form."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return sorted(directory.glob("*.safetensors"))
    return sorted({directory / name for name in index["weight_map"].values()})


def _is_tied(reference: Path | None) -> bool:
    """Whether the head is the embedding: the config says so, or leaves it to the model, whose files have no head."""
    wanted = {} if reference is None else shapes(reference)
    if not wanted or reference is None:
        return False
    if TIED not in wanted:
        return True
    try:
        config = json.loads((reference / "config.json").read_text())
    except FileNotFoundError:
        return False
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
