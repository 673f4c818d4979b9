"""A wrong configuration fails before any process starts, and the error names the key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from zagent.config import OWNED_ENGINE_ARGS, Config
from zagent.config.explain import nearest_key
from zagent.errors import ConfigError


def load(*overrides: str) -> Config:
    return Config.load(overrides=overrides)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_the_defaults_are_the_contracts() -> None:
    """Keys that others rely on."""
    config = Config()
    assert config.rollout.agent == "single_turn_agent"
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (1.0, 1.0, -1)
    val = config.rollout.val_kwargs
    assert (val.temperature, val.top_p, val.top_k) == (0.0, 1.0, -1)
    assert config.rollout.calculate_log_probs
    assert config.rollout.prompt_overflow == "error"
    assert config.rollout.max_failed_fraction == 0
    assert config.routing.sticky_cache_size == 10_000
    assert config.engine.kind == "sglang"


def test_routing_policies_are_off_unless_asked_for() -> None:
    """Each has a double threshold, which the broker gets where it is on."""
    assert load().routing.thresholds == {"group_over": None, "rebind_over": None}
    assert load("routing.group=true").routing.thresholds == {"group_over": (8, 1.5), "rebind_over": None}
    config = load("routing.group=true", "routing.group_over.abs=3", "routing.rebind_over={}")
    assert config.routing.thresholds == {"group_over": (3, 1.5), "rebind_over": (32, 1.5)}
    assert load("routing.rebind_over.rel=2").routing.thresholds["rebind_over"] == (32, 2.0)
    assert "routing.rebind_over.rel" in refused("routing.rebind_over.rel=0.5")


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """YAML, then the dot-list."""
    path = tmp_path / "c.yaml"
    path.write_text("engine: {kind: sim, count: 3}\nrollout:\n  temperature: 0.5\n  imports: [a, b]\n")
    config = Config.load(path, overrides=["engine.count=2", "rollout.top_p=0.9", "engine.sim.seed=7"])
    assert (config.engine.kind, config.engine.count, config.engine.sim.seed) == ("sim", 2, 7)
    assert (config.rollout.temperature, config.rollout.top_p) == (0.5, 0.9)
    assert config.rollout.imports == ("a", "b")


def test_overrides_take_lists_and_maps() -> None:
    """In YAML's own notation."""
    config = load("engine.gpus=[1,0]", "engine.args={attention_backend: triton, mem_fraction_static: 0.5}")
    assert config.engine.gpus == ("1", "0")
    assert config.engine.args == {"attention_backend": "triton", "mem_fraction_static": 0.5}


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("engine.cuont", "engine.count"),
        ("engin.count", "engine.count"),
        ("temperature", "rollout.temperature"),
        ("rollout.val_kwargs.top_pp", "rollout.val_kwargs.top_p"),
        ("engine.simm.seed", "engine.sim.seed"),
        ("worker.max_inflight", "worker.max_in_flight"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key: str, near: str) -> None:
    """As a whole path."""
    text = refused(f"{key}=1")
    assert "unknown key" in text
    assert key.split(".", maxsplit=1)[0] in text
    assert nearest_key(key, Config) == near


def test_the_message_names_the_key_and_the_nearest() -> None:
    """Both in one line."""
    assert refused("rollout.temprature=0.7") == "unknown key 'rollout.temprature', did you mean 'rollout.temperature'?"


def test_an_unknown_key_like_nothing_has_no_suggestion() -> None:
    """Better none than a wrong one."""
    assert refused("xyzzy=1") == "unknown key 'xyzzy'"


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("engine.tensor_parallel_size=two", ["engine.tensor_parallel_size='two'", "integer"]),
        ("rollout.temperature=-1", ["rollout.temperature=-1", "greater than or equal to 0"]),
        ("rollout.top_k=0", ["rollout.top_k=0", "must be -1 (all) or at least 1"]),
        ("rollout.top_k=-2", ["rollout.top_k=-2"]),
        ("rollout.response_length=0", ["rollout.response_length=0"]),
        ("rollout.prompt_overflow=right", ["rollout.prompt_overflow='right'", "'left'"]),
        ("engine.count=0", ["engine.count=0", "at least 1, or auto"]),
        ("engine.count=some", ["engine.count='some'"]),
        ("engine.kind=vllm", ["engine.kind='vllm'", "'sglang'"]),
        ("worker.count=1.5", ["worker.count=1.5"]),
        ("worker=5", ["worker=5"]),
        ("rollout.max_failed_fraction=1.1", ["rollout.max_failed_fraction=1.1"]),
        ("broker.endpoint=localhost:5555", ["broker", "ipc:// or tcp://", "'localhost:5555'"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key(override: str, texts: list[str]) -> None:
    """And with what would be right."""
    message = refused(override)
    assert all(text in message for text in texts), message


def test_all_mistakes_are_named_at_once() -> None:
    """Not one per try."""
    message = refused("worker.count=0", "rollout.seed=x", "loggs.keep=1")
    assert all(key in message for key in ("worker.count", "rollout.seed", "loggs"))


@pytest.mark.parametrize("override", ["engine.count", "=5", "", "engine count 5"])
def test_an_override_without_a_key_or_value_is_refused(override: str) -> None:
    """The override is quoted."""
    assert refused(override) == f"override {override!r} is not of the form key=value"


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t- x", "{", "a: ${nowhere}", "a: 1\na: {b: 2}\n- x"])
def test_broken_yaml_is_named_with_its_file(text: str, tmp_path: Path) -> None:
    """As `ConfigError`, never YAML's own class."""
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        Config.load(path)


@pytest.mark.parametrize("text", ["- 1\n- 2", "just text", "5"])
def test_a_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    """A configuration has sections."""
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        Config.load(path)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """Nothing said, nothing changed."""
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert Config.load(path) == Config()


@pytest.mark.parametrize("name", ["nowhere.yaml", ""], ids=["missing", "a directory"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    """With the system's reason."""
    path = tmp_path / name
    with pytest.raises(ConfigError, match=str(path)):
        Config.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A binary given by mistake."""
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError):
        Config.load(path)


@pytest.mark.parametrize("key", sorted(OWNED_ENGINE_ARGS))
def test_engine_args_may_not_set_what_zagent_owns(key: str) -> None:
    """Ports, device, seeds, parallel sizes; the key is named."""
    assert f"may not set '{key}': zagent owns it" in refused(f"engine.args.{key}=1")


def test_tcp_needs_keys_or_a_word() -> None:
    """`broker.keys=FILE` or `broker.insecure=true`, else it is refused with both ways out; ipc needs neither."""
    said = refused("broker.endpoint=tcp://127.0.0.1:0")
    assert "broker.insecure=true" in said
    assert "broker.keys=FILE" in said
    assert load("broker.endpoint=tcp://127.0.0.1:0", "broker.insecure=true").broker.insecure
    assert load("broker.endpoint=tcp://127.0.0.1:0", "broker.keys=k").broker.keys == "k"
    assert load("broker.endpoint=ipc:///tmp/x").broker.endpoint == "ipc:///tmp/x"


@pytest.mark.parametrize("endpoint", [[], ["broker.endpoint=ipc:///tmp/x"]])
def test_keys_are_for_tcp(endpoint: list[str]) -> None:
    """Where they would guard nothing they are refused, not ignored."""
    assert "keys are for tcp:// endpoints" in refused("broker.keys=k", *endpoint)


def test_an_endpoint_to_bind_has_no_keys_in_it() -> None:
    """Peers' endpoints have; the error names the key to use."""
    said = refused("broker.endpoint='tcp://127.0.0.1:0?keys=/k'", "broker.insecure=true")
    assert "give the key file as broker.keys" in said
    assert "broker.keys" in refused("broker.endpoint=tcp://127.0.0.1:0", "broker.keys=''")


def test_a_relative_loop_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may run in another directory (pitfall F2)."""
    monkeypatch.chdir(tmp_path)
    loops = load("rollout.agent_loop_config_path=sub/../loops.yaml").rollout.agent_loop_config_path
    assert loops == str(tmp_path.resolve() / "loops.yaml")
    assert Config().rollout.agent_loop_config_path is None


@pytest.mark.parametrize(("path", "found"), [("t/{worker}.jsonl", "{here}/t/{{worker}}.jsonl"), ("s3://x", "s3://x")])
def test_a_tracers_relative_path_becomes_absolute(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's directory, with its placeholders; a URL stays."""
    monkeypatch.chdir(tmp_path)
    args = Config.load(overrides=["trace.target=a.B", f"trace.args.path={path}", "trace.args.depth=3"]).trace.args
    assert args == {"path": found.format(here=tmp_path), "depth": 3}


def test_an_absolute_loop_file_stays() -> None:
    """As it was given."""
    assert load("rollout.agent_loop_config_path=/x/y.yaml").rollout.agent_loop_config_path == "/x/y.yaml"


def test_plain_data_and_back() -> None:
    """`to_dict` is JSON, and `from_dict` takes it back unchanged."""
    config = load(
        "engine.gpus=[GPU-a,GPU-b]",
        "engine.sim.faults=[{do: slow, factor: 2}]",
        "rollout.imports=[m]",
        "engine.count=auto",
    )
    data = json.loads(json.dumps(config.to_dict()))
    assert Config.from_dict(data) == config


@pytest.mark.parametrize("data", [None, [], "x", 5, {"engine": None}, {5: 1}], ids=repr)
def test_plain_data_of_another_form_is_refused(data: Any) -> None:
    """As `ConfigError`."""
    with pytest.raises(ConfigError):
        Config.from_dict(data)


def test_a_configuration_is_frozen() -> None:
    """Sections are handed from process to process as they are."""
    with pytest.raises(ValidationError):
        Config().worker.count = 5  # type: ignore[misc]


def test_paths_of_any_kind_are_taken(tmp_path: Path) -> None:
    """Text and `os.PathLike`."""
    path = tmp_path / "c.yaml"
    path.write_text("worker: {count: 5}")
    assert Config.load(os.fspath(path)) == Config.load(path)


SERVICE = "services.box.target=my.Box"
JUDGE = "services.judge.model.path=m"


def test_services_are_classes_or_engines() -> None:
    """With the defaults of each; a configuration survives being sent."""
    config = Config.load(overrides=[SERVICE, JUDGE, "services.box.env={N: 4, X: y}", "services.judge.engine.kind=sim"])
    box, judge = config.services["box"], config.services["judge"]
    assert (box.target, box.count, box.credits, box.env, box.engine) == ("my.Box", 1, 64, {"N": "4", "X": "y"}, None)
    assert judge.engine is not None
    assert (judge.engine.kind, judge.engine.count, judge.credits) == ("sim", 1, 512)
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["services.box.count=2"], "services.box: needs either target"),
        ([SERVICE, "services.box.model.path=m"], "services.box: needs either target"),
        ([SERVICE, "services.box.engine.count=1"], "services.box: engine belongs to model"),
        ([JUDGE, "services.judge.count=2"], "services.judge: count and args are a class's"),
        ([JUDGE, "services.judge.args={a: 1}"], "services.judge: count and args are a class's"),
        ([JUDGE, "services.judge.engine.count=auto"], "services.judge: engine.count must be a number here"),
        ([JUDGE, "services.judge.engine=5"], "services.judge.engine"),
        ([SERVICE, "services.box.env={ZAGENT_RUN_ID: x}"], "services.box.env: may not set 'ZAGENT_RUN_ID'"),
        ([SERVICE, "services.box.env={'A=B': x}"], "'A=B' cannot be a variable"),
        ([SERVICE, "services.box.env={'': x}"], "'' cannot be a variable"),
        ([SERVICE, "services.box.env.FLAG=true"], "services.box.env.FLAG=True"),
        ([SERVICE, "services.box.env=5"], "services.box.env=5: must be a map"),
        (["services.engine.target=x.Y"], "services: 'engine' cannot name a pool"),
        (["services.box.targt=x.Y"], "did you mean 'services.box.target'?"),
        ([JUDGE, "services.judge.engine.conut=2"], "did you mean 'services.judge.engine.count'?"),
        (["services.box.max_in_flight=0", SERVICE], "services.box.max_in_flight=0"),
    ],
)
def test_a_service_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    """With its key and the reason."""
    with pytest.raises(ConfigError) as refused:
        Config.load(overrides=overrides)
    assert message in str(refused.value)
