"""What SGLang is started with."""

from __future__ import annotations

import importlib
import logging
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from zagent.config import Config, EngineConfig, ModelConfig
from zagent.engine import sglang_arguments as setup
from zagent.errors import ConfigError, StartupError


def arguments(*, cpu: bool = True, seed: int = 3, **engine: Any) -> dict[str, Any]:
    return setup.server_arguments(
        ModelConfig(trust_remote_code=True),
        EngineConfig(**engine),
        model_path="/models/m",
        cpu=cpu,
        seed=seed,
        nccl_port=29500,
        port=30000,
    )


def test_ports_seed_and_model_are_what_was_given() -> None:
    """Ports, seed and model path come from the caller, so that engines on one host differ."""
    found = arguments()
    assert (found["nccl_port"], found["port"], found["random_seed"], found["model_path"]) == (
        29500,
        30000,
        3,
        "/models/m",
    )
    assert found["trust_remote_code"] is True


def test_versions_count_from_zero() -> None:
    """The first weights are version "0": every version is a number."""
    assert arguments()["weight_version"] == "0"


def test_idle_engines_sleep() -> None:
    """SGLang is told not to poll while idle."""
    assert arguments()["sleep_on_idle"] is True


@pytest.mark.parametrize(("tokens", "interval"), [(0, None), (64, 64)])
def test_answers_are_streamed_in_the_steps_that_callers_are_told(tokens: int, interval: int | None) -> None:
    """SGLang sends nothing in between; without `checkpoint_tokens` nothing is streamed."""
    assert arguments(checkpoint_tokens=tokens).get("stream_interval") == interval
    with pytest.raises(ConfigError, match="zagent owns it"):
        Config.from_dict({"engine": {"args": {"stream_interval": 1}}})


def test_cpu_runs_float32_on_torch_native() -> None:
    """Without a GPU the defaults are exact and need no kernels."""
    found = arguments()
    assert (found["device"], found["attention_backend"], found["dtype"]) == ("cpu", "torch_native", "float32")


def test_gpu_keeps_sglangs_own_defaults() -> None:
    """On a GPU neither dtype nor backend nor cache size is ours to choose."""
    assert not set(setup.CPU_ARGUMENTS) & set(arguments(cpu=False))


def test_users_arguments_win_over_defaults() -> None:
    """`engine.args` replaces our defaults and adds to them."""
    found = arguments(args={"dtype": "bfloat16", "page_size": 16})
    assert (found["dtype"], found["page_size"]) == ("bfloat16", 16)


def test_users_arguments_cannot_take_what_is_zagents() -> None:
    """Every argument that zagent computes is refused in `engine.args`, so that none is silently overridden."""
    computed = set(arguments()) - set(setup.CPU_ARGUMENTS) - set(setup.DEFAULT_ARGUMENTS)
    for key in computed | {"device"}:
        with pytest.raises(ConfigError, match="zagent owns it"):
            Config.from_dict({"engine": {"args": {key: 1}}})


def test_tensor_parallelism_needs_gpus() -> None:
    """Tensor parallelism on a CPU is refused by name before anything starts; on GPUs it is passed on."""
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size=2"):
        arguments(tensor_parallel_size=2)
    assert arguments(cpu=False, tensor_parallel_size=2)["tp_size"] == 2


def test_several_tokenizer_processes_are_refused() -> None:
    """They would move SGLang's bookkeeping out of this process."""
    with pytest.raises(ConfigError, match="tokenizer_worker_num"):
        arguments(args={"tokenizer_worker_num": 2})


def test_seed_fits_numpys_range() -> None:
    """Any seed of ours is one that SGLang can give to numpy."""
    assert 0 <= arguments(seed=2**63)["random_seed"] < 2**32


@pytest.mark.parametrize(
    ("args", "expected"),
    [({}, False), ({"enable_deterministic_inference": True}, True), ({"rl_on_policy_target": "fsdp"}, True)],
)
def test_seeds_are_honoured_in_deterministic_mode_only(args: dict[str, Any], expected: bool) -> None:
    """A request's seed reaches SGLang exactly where SGLang samples by it."""
    assert setup.honours_seeds(EngineConfig(args=args)) is expected


def test_failing_child_becomes_an_exception() -> None:
    """The SIGQUIT handler of the start raises, and travels to SGLang's children as a name."""
    handler = setup.startup_failed
    assert getattr(importlib.import_module(handler.__module__), handler.__qualname__) is handler
    with pytest.raises(StartupError):
        handler(3, None)


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.5.230", "0.6.0"])
def test_other_versions_of_sglang_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """The adapter runs with the version it is written for, and the message names both."""
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(ConfigError, match=f"needs sglang 0.5.23, found {found}"):
        setup.check_version()


@pytest.mark.parametrize("found", ["0.5.23", "0.5.23.post1"])
def test_the_right_version_passes(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """The version itself and its post releases are accepted."""
    monkeypatch.setattr(metadata, "version", lambda name: found)
    setup.check_version()


def test_missing_sglang_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the message names it, and the simulated engine."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"zagent\[sglang\].*engine.kind=sim"):
        setup.check_version()


def test_environment_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are set where they are missing, and only there; the CPU's only on a CPU."""
    environment = {"SGLANG_VLM_CACHE_SIZE_MB": "64"}
    monkeypatch.setattr(setup.os, "environ", environment)
    setup.set_environment(cpu=False)
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "64"
    assert environment["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "0"
    assert not {"TORCHDYNAMO_DISABLE", "SGLANG_PLATFORM"} & set(environment)
    setup.set_environment(cpu=True)
    assert (environment["TORCHDYNAMO_DISABLE"], environment["SGLANG_PLATFORM"]) == ("1", "zagent_cpu")


def test_root_logger_survives_the_start() -> None:
    """Handlers and level of the root logger are the same after SGLang has replaced them, and still open."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with setup.own_logging("warning"):
        logging.basicConfig(level=logging.ERROR, force=True)
    assert (root.handlers, root.level) == (handlers, level)


def test_sockets_go_to_a_directory_with_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory with a very long path is not used for sockets, whose paths are limited."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    found = setup.scratch_directory()
    found.rmdir()
    assert len(str(found)) < 60


def test_temporary_files_are_directed_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the block temporary files are made in the directory, afterwards where they were before."""
    monkeypatch.setenv("CUDA_TILE_TEMP_DIR", "")
    before = tempfile.gettempdir()
    with setup.temporary_files_in(tmp_path):
        assert tempfile.gettempdir() == str(tmp_path)
    assert tempfile.gettempdir() == before
