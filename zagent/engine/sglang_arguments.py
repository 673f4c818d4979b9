"""How SGLang is started: its version, environment, arguments, logging and temporary files. Imports no sglang."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from zagent.config import EngineConfig, ModelConfig
from zagent.engine.cpu_platform import PLATFORM_NAME
from zagent.errors import ConfigError, StartupError

#: Internals change with every release of SGLang; another one needs a new look at `sglang_engine` and `sglang_launch`.
SGLANG_VERSION = "0.5.23"

#: Images are processed as in our workers, which tell the trainer what the model saw: SGLang's own choice, torchvision
#: on whatever device, rounds otherwise.
DEFAULT_ARGUMENTS: dict[str, Any] = {"log_level": "warning", "image_processor_backend": "pil"}

#: On a CPU SGLang sizes its cache by free memory unless told otherwise. The cache is committed as it fills: 46 kB per
#: token of the built-in model in float32. More running requests than 32 gain nothing on a few cores. float32 because
#: exactness comes first: bfloat16 is 1.2 to 2 times as fast and saves 1 GB, but its log-probabilities are off by 0.02
#: on average and up to 0.17; `engine.args.dtype=bfloat16` asks for it.
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.8,
    "max_total_tokens": 32_768,
    "max_running_requests": 32,
    "dtype": "float32",
}


def check_version() -> None:
    """Raises `ConfigError` unless the SGLang that `sglang_engine` is written for is installed."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        hint = "pip install 'zagent[sglang]', or use the simulated engine (engine.kind=sim)"
        raise ConfigError(f"engine.kind=sglang needs sglang {SGLANG_VERSION}, which is not installed: {hint}") from None
    if found != SGLANG_VERSION and not found.startswith(SGLANG_VERSION + ".post"):
        raise ConfigError(f"engine.kind=sglang needs sglang {SGLANG_VERSION}, found {found}")


def set_environment(*, cpu: bool) -> None:
    """Variables that SGLang reads when it is imported; what the user has set stays."""
    variables = {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # up to a minute of diagnostics before a crash is admitted
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # survives weight updates and cache flushes: wrong by up to 0.6 nats
    }
    if cpu:
        variables["SGLANG_PLATFORM"] = PLATFORM_NAME
        variables["TORCHDYNAMO_DISABLE"] = "1"  # compiling needs a C++ compiler, and takes longer than it saves
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def server_arguments(
    model: ModelConfig, engine: EngineConfig, *, model_path: str, cpu: bool, seed: int, nccl_port: int, port: int
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`: ours, the user's `engine.args`, and those that are zagent's alone.

    Raises:
        ConfigError: tensor parallelism or routed experts on a CPU, or several tokenizer processes.
    """
    if cpu and engine.tensor_parallel_size > 1:
        raise ConfigError(f"engine.tensor_parallel_size={engine.tensor_parallel_size} needs GPUs, and there is none")
    if cpu and engine.args.get("enable_return_routed_experts"):
        raise ConfigError(
            "engine.args.enable_return_routed_experts needs a GPU (or engine.kind=sim with sim.moe_layers)"
        )
    if engine.args.get("tokenizer_worker_num", 1) != 1:
        raise ConfigError("engine.args.tokenizer_worker_num must be 1: start more engines instead")
    return {
        **DEFAULT_ARGUMENTS,
        **(CPU_ARGUMENTS if cpu else {}),
        **({"enable_memory_saver": True} if engine.mode == "hybrid" and not cpu else {}),
        **engine.args,
        "model_path": model_path,
        "tokenizer_path": model.tokenizer_path,
        "trust_remote_code": model.trust_remote_code,
        "tp_size": engine.tensor_parallel_size,
        "port": port,
        "nccl_port": nccl_port,
        "random_seed": seed % 2**31,
        "weight_version": "0",
        "sleep_on_idle": True,  # else an idle scheduler polls, with a whole core
        **({"stream_interval": engine.checkpoint_tokens} if engine.checkpoint_tokens else {}),
        "custom_sigquit_handler": startup_failed,
    }


def releases_memory(engine: EngineConfig, *, cpu: bool) -> bool:
    """Whether SGLang can give memory back. On a CPU it dies of the attempt."""
    return not cpu and bool(engine.args.get("enable_memory_saver", engine.mode == "hybrid"))


def honours_seeds(engine: EngineConfig) -> bool:
    """Whether SGLang samples by each call's `sampling_seed`: only in its deterministic mode."""
    return bool(engine.args.get("enable_deterministic_inference") or engine.args.get("rl_on_policy_target"))


def experts_shape(engine: EngineConfig, text_config: Any) -> tuple[int, int] | None:
    """(layers, experts per token) of the routing that SGLang records; None where it is not told to.

    ``text_config`` is the model's. Layers without experts are counted, as SGLang counts them.
    """
    if not engine.args.get("enable_return_routed_experts"):
        return None
    return text_config.num_hidden_layers, text_config.num_experts_per_tok


def startup_failed(signum: int, frame: Any) -> None:
    """Handler of the SIGQUIT by which SGLang's children say that they failed, while SGLang starts.

    SGLang's own would send SIGKILL to the whole process. Public and at the top of a module because SGLang pickles its
    arguments to its children.
    """
    raise StartupError("a process of SGLang failed while it started; its messages are in the log")


def scratch_directory() -> Path:
    """A new directory for the sockets that SGLang names in the temporary directory and never removes."""
    base = tempfile.gettempdir()
    short = len(base) <= 60  # a socket's whole path may have 107 characters
    return Path(tempfile.mkdtemp(prefix="zagent-sglang-", dir=base if short else "/tmp"))


@contextmanager
def temporary_files_in(directory: Path) -> Iterator[None]:
    """This process's temporary files go to ``directory``; its children keep TMPDIR, where compilers keep caches."""
    before = tempfile.tempdir
    tempfile.tempdir = str(directory)
    os.environ["CUDA_TILE_TEMP_DIR"] = str(directory)  # else three empty directories are left for each engine
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def own_logging(level: str) -> Iterator[None]:
    """SGLang configures the root logger with force=True, which removes and closes what is there."""
    root = logging.getLogger()
    handlers, root_level = root.handlers, root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(root_level)
        logging.getLogger("sglang").setLevel(level.upper())
