"""Services among the processes to start: user classes, and engines with models of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import pytest

from launcher.gpus import Gpus
from launcher.machine import Machine
from launcher.plan import ROOMS, Facts, Model, plan
from launcher.ports import EnginePorts
from launcher.specs import ChildSpec, Plan, Run
from zagent.config import Config
from zagent.errors import ConfigError

RUN = Run("run-1", "/run/z", "/run/z/t", "/cache/inductor", 4242, "s3cret")
UUIDS = {str(i): f"GPU-{i}aaa" for i in range(8)}
ACTOR = "services.box.target=my.Box"
JUDGE = "services.judge.model.path=judge-model"


def machine(gpus: int = 0, cores: int = 8, memory_gb: float = 24.0) -> Machine:
    return Machine(cores, int(memory_gb * 1e9), Gpus.visible(None, dict(list(UUIDS.items())[:gpus])))


def make(*overrides: str, on: Machine | None = None) -> Plan:
    ports: Iterator[EnginePorts] = (EnginePorts(n, n + 1) for n in count(20_000, 2))
    models = {name: Model(f"/models/{name}", 512) for name in ("judge", "teacher")}
    facts = Facts(on or machine(), Model("/models/policy", 4096), RUN, models)
    return plan(Config.load(overrides=overrides), facts, lambda: next(ports))


def devices(specs: tuple[ChildSpec, ...]) -> list[str]:
    return [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs]


def test_a_class_has_its_processes() -> None:
    """Each a member of the pool of the service's name, with its arguments, environment and credits."""
    made = make(ACTOR, "services.box.count=2", "services.box.args={limit: 3}", "services.box.max_in_flight=7")
    assert [(s.name, s.room, s.entry, s.pool) for s in made.services] == [
        (f"box-{i}", "service", ROOMS["service"], "box") for i in range(2)
    ]
    assert made.services[1].settings == {
        "secret": "s3cret",
        "pool": "box",
        "name": "box-1",
        "epoch": 1,
        "credits": 7,
        "target": "my.Box",
        "args": {"limit": 3},
        "services": {"box": {"model": False}},
        "stop_timeout_s": 3.0,
    }
    assert json.loads(json.dumps(made.services[1].settings)) == made.services[1].settings


def test_a_class_sees_no_gpu_unless_it_is_given_one() -> None:
    """The user's environment wins; zagent's marks are added, and temporary files go with the run."""
    (spec,) = make(ACTOR, on=machine(gpus=2)).services
    assert spec.env == {
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": "/run/z/t",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "ZAGENT_RUN_ID": "run-1",
        "ZAGENT_CHILD": "box-0",
    }
    (spec,) = make(ACTOR, "services.box.env={CUDA_VISIBLE_DEVICES: '1', TMPDIR: /fast}", on=machine(gpus=2)).services
    assert (spec.env["CUDA_VISIBLE_DEVICES"], spec.env["TMPDIR"]) == ("1", "/fast")


def test_the_broker_and_the_workers_know_the_services() -> None:
    """Pools by name; which of them are engines; models where they lie."""
    made = make(ACTOR, JUDGE)
    assert made.broker.settings["pools"] == ["engine", "worker", "box", "judge"]
    told = Config.from_dict(made.broker.settings["info"]["config"])
    assert told.services["judge"].model is not None
    assert (told.services["judge"].model.path, told.model.path) == ("/models/judge", "/models/policy")
    for worker in made.workers:
        assert worker.settings["services"] == {"box": {"model": False}, "judge": {"model": True}}


def test_keys_of_the_users_are_told_to_the_service_alone() -> None:
    """Its environment and arguments are not in what the broker tells every peer."""
    made = make(ACTOR, "services.box.env.KEY=s3cret-key", "services.box.args.key=s3cret-too")
    assert "s3cret-" not in json.dumps(made.broker.settings)
    assert (made.services[0].env["KEY"], made.services[0].settings["args"]) == ("s3cret-key", {"key": "s3cret-too"})


def test_a_judge_is_engines_of_its_own_pool() -> None:
    """With ports, a model and a seed of their own; started again like any service."""
    made = make(JUDGE, "services.judge.engine.count=2", "engine.count=1", "rollout.seed=5", "services.judge.env.A=1")
    assert [s.ports for s in (*made.engines, *made.services)] == [
        EnginePorts(n, n + 1) for n in (20_000, 20_002, 20_004)
    ]
    first, second = made.services
    assert (first.name, first.room, first.entry, first.pool) == ("judge-0", "service", ROOMS["engine"], "judge")
    assert (first.settings["pool"], made.engines[0].settings["pool"]) == ("judge", "engine")
    assert first.settings["model"]["path"] == "/models/judge"
    assert second.settings["members"] == [{"name": "judge-1", "index": 1, "epoch": 1}]
    assert (second.settings["seed"], second.settings["engine"]["count"]) == (6, 2)
    assert (first.env["A"], first.env["ZAGENT_CHILD"]) == ("1", "judge-0")
    assert "A" not in made.engines[0].env


@pytest.mark.parametrize(
    ("overrides", "credits"),
    [
        ((), 512),
        (("services.judge.max_in_flight=9",), 9),
        (("services.judge.engine.max_in_flight=40",), 40),
        (("services.judge.max_in_flight=90", "services.judge.engine.max_in_flight=40"), 40),
        (("routing.max_in_flight_per_engine=16",), 512),
    ],
)
def test_a_judges_credits_are_its_own(overrides: tuple[str, ...], credits: int) -> None:
    """The lesser of the service's and its engine's limit."""
    assert make(JUDGE, *overrides).services[0].settings["credits"] == credits


def test_simulated_judges_share_processes() -> None:
    """As the policy's do."""
    made = make(JUDGE, "services.judge.engine={kind: sim, count: 3, sim: {per_process: 2}}", on=machine(memory_gb=11))
    assert [s.name for s in made.services] == ["judge-0-to-1", "judge-2"]
    assert len(made.engines) == 2  # simulated ones cost no memory to speak of


# ---- devices ----------------------------------------------------------------------------------------------------


def test_judges_get_the_gpus_that_the_policy_leaves() -> None:
    """In the order of the configuration; a number of policy's engines is theirs first."""
    made = make("engine.count=2", JUDGE, "services.teacher.model.path=x", on=machine(gpus=4))
    assert (devices(made.engines), devices(made.services)) == (["0", "1"], ["2", "3"])


def test_auto_leaves_judges_their_gpus() -> None:
    """One of four; with tensor parallelism two."""
    made = make(JUDGE, on=machine(gpus=4))
    assert (devices(made.engines), devices(made.services)) == (["0", "1", "2"], ["3"])
    made = make(JUDGE, "services.judge.engine.tensor_parallel_size=2", on=machine(gpus=4))
    assert (devices(made.engines), devices(made.services)) == (["0", "1"], ["2,3"])


def test_gpus_that_a_judge_names_are_its_own() -> None:
    """By index or UUID; `auto` stays off them, engines that were counted may share them."""
    own = "services.judge.engine.gpus=[GPU-0aaa]"
    made = make(JUDGE, own, on=machine(gpus=3))
    assert (devices(made.engines), devices(made.services)) == (["1", "2"], ["GPU-0aaa"])
    made = make(JUDGE, own, "engine.count=3", on=machine(gpus=3))
    assert (devices(made.engines), devices(made.services)) == (["0", "1", "2"], ["GPU-0aaa"])


def test_gpus_that_the_policy_names_are_not_a_judges() -> None:
    """It takes others, in CUDA's order."""
    made = make(JUDGE, "engine.gpus=[GPU-0aaa,2]", on=machine(gpus=4))
    assert (devices(made.engines), devices(made.services)) == (["GPU-0aaa", "2"], ["1"])


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (("engine.count=2",), 2, "needs 1 GPUs, none is left"),
        ((), 1, "needs 1 GPUs, none is left"),
        (("engine.count=1", "services.judge.engine.count=2"), 2, r"needs 2 GPUs, 1 can be used \(1\)"),
        (("services.judge.engine.gpus=[7]",), 2, "engine.gpus names '7'"),
    ],
)
def test_too_few_gpus_for_a_judge_are_refused(overrides: tuple[str, ...], gpus: int, message: str) -> None:
    """It never falls back to the CPU beside GPUs; the message names the service."""
    with pytest.raises(ConfigError, match=rf"services\.judge: .*{message}"):
        make(JUDGE, *overrides, on=machine(gpus=gpus))


@pytest.mark.parametrize(("memory_gb", "engines"), [(10.1, 1), (15.1, 2), (400, 2)])
def test_on_a_cpu_a_judge_counts_as_an_engine(memory_gb: float, engines: int) -> None:
    """`auto` leaves it its 5 GB, and all share the cores."""
    made = make(JUDGE, on=machine(memory_gb=memory_gb))
    assert devices(made.engines) == [""] * engines
    assert devices(made.services) == [""]
    assert {s.env["OMP_NUM_THREADS"] for s in (*made.engines, *made.services)} == {str(8 // (engines + 1))}


def test_too_little_memory_for_a_judge_is_refused() -> None:
    """What the policy's engines take is not there any more."""
    with pytest.raises(
        ConfigError, match=r"services\.judge: engine.count=1: 1 engine on this CPU need about 5.0 GB .* 4.0"
    ):
        make(JUDGE, on=machine(memory_gb=9.0))


def test_a_class_takes_nothing_from_the_policy() -> None:
    """Neither GPUs nor memory are set aside."""
    assert devices(make(ACTOR, on=machine(gpus=2)).engines) == ["0", "1"]
    assert len(make(ACTOR, on=machine(memory_gb=10.1)).engines) == 2


def test_a_judges_engines_follow_the_policys_interpreter() -> None:
    """Unless they have their own; classes stay with the launcher."""
    made = make(ACTOR, JUDGE, "engine.python=/env/bin/python", "engine.count=1")
    assert {spec.name: spec.python for spec in made.services} == {"box-0": "", "judge-0": "/env/bin/python"}
    own = make(JUDGE, "engine.python=/env/bin/python", "engine.count=1", "services.judge.engine.python=/own/python")
    assert [spec.python for spec in own.services] == ["/own/python"]
