"""A trainer's weights as a directory of safetensors under the names of the checkpoint that the engines started with."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from zagent.errors import InputError, WeightUpdateError

#: A directory of safetensors; a model with `save_pretrained`; or (name, tensor) pairs.
Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]] | Any"
Forms: TypeAlias = "dict[str, Form]"
#: Left out of a checkpoint where it is the embedding.
TIED = "lm_head.weight"


class Form(NamedTuple):
    """Of a tensor: what must be as it is in the engines' checkpoint."""

    shape: tuple[int, ...]
    floats: bool  #: of whatever width: engines convert them


def write_checkpoint(source: Source, directory: Path, reference: Path | None) -> Path:
    """Write ``source`` to ``directory`` (which appears whole or not at all), and check it; blocks. A ``source`` that is
    a directory is used where it lies.

    Args:
        reference: the engines' checkpoint. Names and shapes must be its: SGLang skips names that it does not know
            without a word, or dies of them. None, or without safetensors: any.

    Raises:
        InputError: names or shapes that differ; tensors that have no values, or none of the kind; a source of another
            kind.
        WeightUpdateError: there is no room for them.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).resolve()
        check_checkpoint(path, reference)
        return path
    draft = directory.with_name(directory.name + ".draft")
    try:
        draft.mkdir(parents=True, mode=0o700)
        _save(source, draft, reference)
        check_checkpoint(draft, reference)
        draft.rename(directory)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)  # it may be gone; what came before says more
        if _is_full(error):
            text = f"no room for the weights in {directory.parent}: engine.weights_dir can name another place"
            raise WeightUpdateError(f"{text} ({error})") from error
        raise
    return directory


def _is_full(error: BaseException) -> bool:
    """No room in the file system, or in a quota; safetensors says so only in words."""
    from safetensors import SafetensorError

    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, SafetensorError):
        return any(f"os error {number})" in str(error) for number in full)
    return isinstance(error, OSError) and error.errno in full


def _save(source: Any, directory: Path, reference: Path | None) -> None:
    if hasattr(source, "save_pretrained"):  # it gives the names of the checkpoint, where those in memory differ
        with _no_progress_bar():
            source.save_pretrained(directory)
        return
    from safetensors.torch import save_file

    tensors = {name: tensor.detach() for name, tensor in _named(source, reference).items()}
    unknown = {dtype for dtype in {tensor.dtype for tensor in tensors.values()} if not _has_files(dtype)}
    odd = {f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype in unknown}
    _refuse("of a dtype that safetensors does not have", odd)
    save_file(
        _apart({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), directory / "w.safetensors"
    )


def _has_files(dtype: Any) -> bool:
    """Whether safetensors can write it."""
    import torch
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # by version and dtype, from a KeyError to a NotImplementedError
        return False
    return True


def _apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each in memory of its own: two names of one tensor, or views that overlap, are refused by safetensors."""
    apart, end = dict(tensors), 0
    for name, tensor in sorted(tensors.items(), key=lambda named: named[1].data_ptr()):
        if tensor.nbytes and tensor.data_ptr() < end:
            apart[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


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
        if tensor.is_meta or str(tensor.layout) != "torch.strided":
            what = "is on the meta device, where it has no values" if tensor.is_meta else f"has layout {tensor.layout}"
            raise InputError(f"weights are dense tensors: {name!r} {what}")
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
    found = {name: Form(tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
    _check(found, reference, "it")
    return tensors


def check_checkpoint(path: Path, reference: Path | None) -> None:
    """Raises `InputError` where ``path`` has no safetensors, or others than ``reference`` by name, shape or kind."""
    if not path.is_dir():
        raise InputError(f"no weights: {path} is {'no directory' if path.exists() else 'not there'}")
    _check(forms(path), reference, str(path))


def _check(found: Forms, reference: Path | None, where: str) -> None:
    if not found:
        raise InputError(f"no weights: {where} has not a single tensor in safetensors")
    wanted = {} if reference is None else forms(reference)
    if not wanted:
        return
    optional = {TIED} if _is_tied(reference) else set()
    _refuse("unknown to the engines' checkpoint", found.keys() - wanted.keys() - optional)
    _refuse("missing", wanted.keys() - found.keys() - optional)
    both = found.keys() & wanted.keys()
    wrong = {n for n in both if found[n].shape != wanted[n].shape}
    _refuse("of another shape", {f"{n} {list(found[n].shape)} instead of {list(wanted[n].shape)}" for n in wrong})
    _refuse("that are no floating-point numbers", {n for n in both if wanted[n].floats and not found[n].floats})


def _refuse(what: str, names: set[str]) -> None:
    if names:
        some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise InputError(f"weights {what}: {some}")


def forms(directory: Path) -> Forms:
    """Of all tensors in its safetensors, read from the files' headers. Raises `InputError`."""
    from safetensors import SafetensorError, safe_open

    found: Forms = {}
    for file in _files(directory):
        try:
            with safe_open(file, "numpy") as opened:
                found |= {name: _form(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read: {error}") from error
    return found


def _form(header: Any) -> Form:
    return Form(tuple(header.get_shape()), header.get_dtype().startswith(("F", "BF")))


def _files(directory: Path) -> list[Path]:
    """Those of the index, where there is one: beside them may lie the same weights in other people's form."""
    file = directory / "model.safetensors.index.json"
    index = _read(file)
    if index is None:
        return sorted(directory.glob("*.safetensors"))
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{file} cannot be used: it has no weight_map of names to files")
    return sorted({directory / name for name in names.values()})


def _read(file: Path) -> dict[str, Any] | None:
    """The JSON object in it; None = there is no such file. Raises `InputError`."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} cannot be used: a {type(found).__name__} instead of an object")
    return found


def _is_tied(reference: Path | None) -> bool:
    """Whether the head is the embedding: the config says so, or leaves it to the model, whose files have no head."""
    wanted = {} if reference is None else forms(reference)
    if not wanted or reference is None:
        return False
    if TIED not in wanted:
        return True
    config = _read(reference / "config.json") or {}
    return bool(config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings", False)))
