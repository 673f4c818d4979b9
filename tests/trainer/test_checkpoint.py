"""A trainer's weights as a directory of safetensors, checked against the engines' checkpoint."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zagent.errors import InputError, WeightUpdateError
from zagent.trainer.checkpoint import check_checkpoint, forms, tensors_of, write_checkpoint

Tensors = dict[str, torch.Tensor]


def tensors(**changed: Any) -> Tensors:
    """A tiny model's, without a head; None leaves one out."""
    made = {"embed.weight": torch.arange(12.0).reshape(4, 3), "norm.weight": torch.ones(3), **changed}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def checkpoint(place: Path, made: Tensors | None = None, **config: Any) -> Path:
    place.mkdir()
    save_file(tensors() if made is None else made, place / "model.safetensors")
    if config:
        (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """With a head of its own."""
    return checkpoint(tmp_path / "reference", tensors(**{"lm_head.weight": torch.zeros(4, 3)}))


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """A head that is the embedding is in no file."""
    return checkpoint(tmp_path / "headless")


HEAD = {"lm_head.weight": torch.full((4, 3), 7.0)}


@pytest.mark.parametrize("as_pairs", [False, True])
def test_named_tensors_are_written(as_pairs: bool, reference: Path, tmp_path: Path) -> None:
    """A map or pairs: parameters, half precision, views and transposed ones as they are; nothing but the directory
    is there afterwards, and only its owner may look into it."""
    made = tensors(**HEAD, **{"norm.weight": torch.nn.Parameter(torch.rand(6)[::2])})
    made["embed.weight"] = torch.rand(3, 4).bfloat16().T
    place = tmp_path / "out" / "1"
    assert write_checkpoint(iter(made.items()) if as_pairs else made, place, reference) == place
    found = load_file(place / "w.safetensors")
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in made.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["1"]
    assert place.stat().st_mode & 0o077 == 0


def test_a_model_is_written_by_its_own_names(tmp_path: Path) -> None:
    """transformers', with those of the checkpoint and its config; without a progress bar."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from zagent.models import resolve

    path = Path(resolve("tiny"))
    model = AutoModelForCausalLM.from_pretrained(path)
    shown = logging.is_progress_bar_enabled()
    place = write_checkpoint(model, tmp_path / "1", path)
    assert forms(place) == forms(path)
    assert (place / "config.json").exists()
    assert logging.is_progress_bar_enabled() == shown


def test_a_models_state_dict_is_written_too(tmp_path: Path) -> None:
    """With the head that is its embedding, under both names: once is enough."""
    from transformers import AutoModelForCausalLM

    from zagent.models import resolve

    path = Path(resolve("tiny"))
    model = AutoModelForCausalLM.from_pretrained(path)
    for number, named in enumerate((model.state_dict(), model.named_parameters())):
        place = write_checkpoint(named, tmp_path / str(number), path)
        assert forms(place) == forms(path)
        assert tensors_of(dict(model.state_dict()), path).keys() == forms(path).keys()


def test_two_names_of_one_tensor_are_two_tensors(reference: Path, tmp_path: Path) -> None:
    """Where the checkpoint has both: safetensors would refuse it."""
    embedding = torch.rand(4, 3)
    made = tensors(**{"embed.weight": embedding, "lm_head.weight": embedding})
    found = load_file(write_checkpoint(made, tmp_path / "1", reference) / "w.safetensors")
    assert torch.equal(found["lm_head.weight"], found["embed.weight"])


def test_views_that_overlap_are_tensors_of_their_own(tmp_path: Path) -> None:
    """As are those that only lie side by side in one memory, which are not copied for it."""
    flat = torch.arange(12.0)
    made = {"a": flat[2:8], "b": flat[:6], "c": flat[8:], "d": flat[8:10], "e": flat[3:3]}
    found = load_file(write_checkpoint(made, tmp_path / "1", None) / "w.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())


def test_a_directory_is_used_where_it_lies(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its whole path, as engines have another working directory; nothing is copied, also where it is refused."""
    place = checkpoint(tmp_path / "mine", tensors(**HEAD))
    monkeypatch.chdir(tmp_path)
    for source in ("mine", Path("mine"), str(place)):
        assert write_checkpoint(source, tmp_path / "unused", reference) == place
    wrong = checkpoint(tmp_path / "wrong", tensors(**HEAD, extra=torch.zeros(1)))
    with pytest.raises(InputError, match="unknown"):
        write_checkpoint(wrong, tmp_path / "unused", reference)
    assert (wrong / "model.safetensors").exists()
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (tensors(**HEAD, extra=torch.zeros(1)), "unknown to the engines' checkpoint: extra"),
        (tensors(**HEAD, **{"norm.weight": None}), "missing: norm.weight"),
        (tensors(), "missing: lm_head.weight"),
        (tensors(**HEAD, **{"norm.weight": torch.ones(4)}), r"of another shape: norm.weight \[4\] instead of \[3\]"),
        (tensors(**HEAD, **{"norm.weight": torch.ones(3, 1)}), r"norm.weight \[3, 1\] instead of \[3\]"),
        ({f"x{i}": torch.zeros(1) for i in range(5)}, "unknown to the engines' checkpoint: x0, x1, x2 and 2 more"),
        ({}, "no weights"),
        (7, "not a int"),
        (None, "not a NoneType"),
        ([1, 2], "pairs of name and tensor, got a int"),
        ({"a": [1.0]}, "pairs of name and tensor, got a list"),
        ({1: torch.zeros(1)}, "pairs of name and tensor"),
        ([("a", torch.zeros(1), 1)], "pairs of name and tensor"),
        ([("a", torch.zeros(1)), ("a", torch.ones(1))], "have 'a' twice"),
        ({"a": torch.zeros(1, device="meta")}, "'a' is on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a' has layout torch.sparse_coo"),
        (
            tensors(**HEAD, **{"norm.weight": torch.ones(3, dtype=torch.int64)}),
            "no floating-point numbers: norm.weight",
        ),
        (tensors(**HEAD, **{"norm.weight": torch.ones(3, dtype=torch.bool)}), "no floating-point numbers: norm.weight"),
        (tensors(**HEAD, **{"norm.weight": torch.ones(3) + 0j}), "no floating-point numbers: norm.weight"),
    ],
)
def test_what_does_not_fit_is_refused(source: Any, text: str, reference: Path, tmp_path: Path) -> None:
    """By name, and nothing is left of it; as files or as tensors to be sent."""
    with pytest.raises(InputError, match=text):
        write_checkpoint(source, tmp_path / "out" / "1", reference)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(InputError, match=text):
        tensors_of(source, reference)


def test_a_dtype_without_files_is_refused(tmp_path: Path) -> None:
    """By the tensor's name, also where there is no checkpoint to compare with; nothing is left."""
    made = {"good": torch.zeros(1), "odd": torch.zeros(1, dtype=torch.complex128)}
    with pytest.raises(InputError, match=r"safetensors does not have: odd \(torch.complex128\)"):
        write_checkpoint(made, tmp_path / "out" / "1", None)
    assert not list((tmp_path / "out").iterdir())


def test_whole_numbers_may_stay_whole_numbers(tmp_path: Path) -> None:
    """What counts is what the engines' checkpoint has; the width of floating-point numbers does not."""
    reference = checkpoint(tmp_path / "reference", {"a": torch.ones(2, dtype=torch.int32), "b": torch.ones(2)})
    for number, a in enumerate((torch.ones(2, dtype=torch.int32), torch.ones(2))):
        write_checkpoint({"a": a, "b": torch.ones(2).bfloat16()}, tmp_path / str(number), reference)


@pytest.mark.parametrize("why", ["nowhere", "empty", "a file", "broken", "lacking"])
def test_a_directory_without_weights_is_refused(why: str, reference: Path, tmp_path: Path) -> None:
    """By its path; also where its files cannot be read, or its index names some that are not there."""
    place = tmp_path / "mine"
    if why == "a file":
        place.write_text("no directory")
    elif why != "nowhere":
        place.mkdir()
    if why == "broken":
        (place / "model.safetensors").write_bytes(b"\0" * 100)
    elif why == "lacking":
        (place / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    what = "cannot be read" if why in ("broken", "lacking") else "no weights"
    with pytest.raises(InputError, match=rf"(?=.*{what}).*{place}"):
        write_checkpoint(place, tmp_path / "unused", reference)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"]
)
def test_an_index_that_cannot_be_used_is_named(text: str, reference: Path, tmp_path: Path) -> None:
    """The file, whatever is wrong with it."""
    place = checkpoint(tmp_path / "mine", tensors(**HEAD))
    (place / "model.safetensors.index.json").write_text(text, "latin-1")
    with pytest.raises(InputError, match=f"{place}/model.safetensors.index.json cannot be"):
        write_checkpoint(place, tmp_path / "unused", reference)


def test_a_failed_write_leaves_nothing(reference: Path, tmp_path: Path) -> None:
    """Whatever the model raises, Ctrl-C too."""

    class Model:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(Model(), tmp_path / "out" / "1", reference)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_file_system_is_named(error: Exception, tmp_path: Path) -> None:
    """With the key that names another one; nothing is left there."""

    class Model:
        def save_pretrained(self, directory: Path) -> None:
            raise error

    with pytest.raises(WeightUpdateError, match=rf"no room for the weights in {tmp_path}/out: engine.weights_dir"):
        write_checkpoint(Model(), tmp_path / "out" / "1", None)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("raises", [True, False])
def test_a_model_that_removes_its_directory(raises: bool, tmp_path: Path) -> None:
    """What it raises itself is the error, and otherwise that there is nothing."""

    class Model:
        def save_pretrained(self, directory: Path) -> None:
            directory.rmdir()
            if raises:
                raise ValueError("my own")

    with pytest.raises(ValueError if raises else InputError, match="my own" if raises else "no weights"):
        write_checkpoint(Model(), tmp_path / "out" / "1", None)


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_head_that_is_the_embedding_may_be_there_or_not(config: dict[str, Any], tmp_path: Path) -> None:
    """It is in no file of the engines' checkpoint, or the config says so: then it may lack, and is not written."""
    reference = checkpoint(tmp_path / "reference", tensors(**(HEAD if config else {})), **config)
    for number, made in enumerate((tensors(), tensors(**HEAD))):
        place = write_checkpoint(made, tmp_path / str(number), reference)
        assert forms(place).keys() == tensors().keys()
        assert tensors_of(made, reference).keys() == tensors().keys()
    check_checkpoint(checkpoint(tmp_path / "mine", tensors(**HEAD)), reference)


def test_a_head_of_its_own_must_be_there(reference: Path, tmp_path: Path) -> None:
    """Where the config says that it is not the embedding, or says nothing."""
    for number, text in enumerate(('{"tie_word_embeddings": false}', "{}")):
        (reference / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"missing: lm_head.weight"):
            write_checkpoint(tensors(), tmp_path / str(number), reference)


def test_without_a_checkpoint_to_compare_anything_goes(tmp_path: Path) -> None:
    """A hub's name, or a model whose files lie elsewhere; but not nothing."""
    (tmp_path / "bare").mkdir()
    for number, reference in enumerate((None, Path("org/model"), tmp_path / "bare")):
        write_checkpoint({"x": torch.zeros(1)}, tmp_path / str(number), reference)
        with pytest.raises(InputError, match="no weights"):
            write_checkpoint({}, tmp_path / "none", reference)


def test_several_files_are_one_checkpoint(reference: Path, tmp_path: Path) -> None:
    """Shards count together; with an index, only those that it names: others may hold the weights in another form."""
    place = tmp_path / "mine"
    place.mkdir()
    for number, (name, tensor) in enumerate(tensors(**HEAD).items()):
        save_file({name: tensor}, place / f"model-{number}.safetensors")
    check_checkpoint(place, reference)
    save_file({"layers.0": torch.zeros(2)}, place / "consolidated.safetensors")
    with pytest.raises(InputError, match=r"unknown.*layers.0"):
        check_checkpoint(place, reference)
    index = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors(**HEAD))}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_checkpoint(place, reference)
    check_checkpoint(reference, place)  # also as what is compared with


def test_weights_in_a_directory_are_not_sent(headless: Path) -> None:
    """The error names the way that they go."""
    with pytest.raises(InputError, match="transport='disk'"):
        tensors_of(headless, headless)


def test_values_are_not_copied_to_be_sent(headless: Path) -> None:
    """The very tensors, on whatever device they are."""
    made = tensors()
    assert all(tensor is made[name] for name, tensor in tensors_of(made, headless).items())
