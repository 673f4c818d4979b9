"""From configuration and machine to child specs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from launcher.gpus import Gpus
from launcher.machine import Machine
from launcher.plan import ROOMS, Facts, Model, plan
from launcher.ports import EnginePorts
from launcher.specs import Plan, Run
from zagent.config import Config
from zagent.errors import ConfigError

RUN = Run("run-1", "/run/z", "/run/z/t", "/cache/inductor", 4242, "s3cret")
UUIDS = {str(i): f"GPU-{i}aaa" for i in range(8)}


def machine(gpus: int = 0, cores: int = 8, memory_gb: float = 24.0) -> Machine:
    return Machine(cores, int(memory_gb * 1e9), Gpus.visible(None, dict(list(UUIDS.items())[:gpus])))


def make(*overrides: str, on: Machine | None = None, context: int | None = 4096) -> Plan:
    ports: Iterator[EnginePorts] = (EnginePorts(n, n + 1) for n in count(20_000, 2))
    facts = Facts(on or machine(), Model("/models/resolved", context), RUN)
    return plan(Config.load(overrides=overrides), facts, lambda: next(ports))


def devices(made: Plan) -> list[str]:
    return [engine.env["CUDA_VISIBLE_DEVICES"] for engine in made.engines]


def test_children_run_the_rooms_entry_points() -> None:
    """Broker, engines and workers start at their rooms' main functions, under their names."""
    made = make("worker.count=3")
    assert (made.broker.name, made.broker.entry) == ("broker", "zagent.broker.server:main")
    assert [(e.name, e.entry) for e in made.engines] == [(f"engine-{i}", ROOMS["engine"]) for i in range(2)]
    assert [(w.name, w.entry) for w in made.workers] == [(f"worker-{i}", ROOMS["worker"]) for i in range(3)]


def test_settings_are_plain_data() -> None:
    """What crosses to a child is JSON, unchanged by a round trip."""
    made = make()
    for child in (made.broker, *made.engines, *made.workers):
        assert json.loads(json.dumps(child.settings)) == child.settings


def test_every_child_carries_run_id_and_name() -> None:
    """The last sweep finds processes by the run id in their environment."""
    made = make()
    for child in (made.broker, *made.engines, *made.workers):
        assert child.env["ZAGENT_RUN_ID"] == "run-1"
        assert child.env["ZAGENT_CHILD"] == child.name


def test_broker_settings() -> None:
    """The broker gets limits, incarnation, and what clients ask it for: the configuration with the model resolved."""
    settings = make("broker.max_pending=7", "routing.sticky_cache_size=9").broker.settings
    assert settings["endpoint"] == "ipc:///run/z/b"
    assert (settings["max_pending"], settings["sticky_cache_size"], settings["incarnation"]) == (7, 9, 1)
    assert settings["routing"] == {"engine": {"group_over": None, "rebind_over": None}}
    info = dict(settings["info"])
    assert Config.from_dict(info.pop("config")).model.path == "/models/resolved"
    assert info == {"run_id": "run-1", "run_dir": "/run/z", "launcher_pid": 4242}


def test_endpoint_of_the_configuration_is_used() -> None:
    """A user's endpoint goes to the broker as it is."""
    group = make("routing.group=true").broker.settings["routing"]["engine"]
    assert group == {"group_over": (8, 1.5), "rebind_over": None}
    assert make("broker.endpoint=ipc:///elsewhere/x").broker.settings["endpoint"] == "ipc:///elsewhere/x"


def test_only_the_broker_is_told_the_key_file() -> None:
    """Everybody else finds the client file in the endpoint."""
    made = make("broker.endpoint=tcp://127.0.0.1:0", "broker.keys=/keys/k")
    assert made.broker.settings["keys"] == "/keys/k"
    assert make().broker.settings["keys"] is None
    assert not any("/keys/k" in json.dumps(child.settings) for child in (*made.engines, *made.workers))


def test_worker_settings() -> None:
    """Workers get the secret, their credits, the resolved model, the rollout section and the context."""
    settings = make("worker.max_in_flight=5", "worker.count=2").workers[1].settings
    assert (settings["name"], settings["epoch"], settings["credits"]) == ("worker-1", 1, 5)
    assert (settings["secret"], settings["context_length"]) == ("s3cret", 4096)
    assert settings["model"]["path"] == "/models/resolved"
    assert settings["rollout"]["response_length"] == 1024


def test_workers_know_reward_trace_and_the_services_names() -> None:
    """Not the services' environments, which may hold keys of their own."""
    services = ["services.box.target=a.Box", "services.box.env.TOKEN=s3cret-token", "services.judge.model.path=j"]
    config = Config.load(overrides=["reward.function=a.b", "trace.target=c.d", "engine.count=1", *services])
    facts = Facts(machine(), Model("/models/m", 4096), RUN, {"judge": Model("/models/j", 4096)})
    settings = plan(config, facts, lambda: EnginePorts(1, 2)).workers[0].settings
    assert settings["reward"]["function"] == "a.b"
    assert settings["trace"]["target"] == "c.d"
    assert settings["services"] == {"box": {"model": False}, "judge": {"model": True}}
    assert "s3cret-token" not in json.dumps(settings)


def test_engine_settings() -> None:
    """Each engine has its own member, ports and seed."""
    made = make("rollout.seed=100")
    assert [e.settings["members"] for e in made.engines] == [
        [{"name": "engine-0", "index": 0, "epoch": 1}],
        [{"name": "engine-1", "index": 1, "epoch": 1}],
    ]
    assert [(e.settings["nccl_port"], e.settings["port"]) for e in made.engines] == [(20000, 20001), (20002, 20003)]
    assert [e.settings["seed"] for e in made.engines] == [100, 101]
    assert made.engines[0].settings["model"]["path"] == "/models/resolved"


@pytest.mark.parametrize(
    ("overrides", "credits"),
    [
        ((), 512),
        (("engine.max_in_flight=40",), 40),
        (("routing.max_in_flight_per_engine=16",), 16),
        (("engine.max_in_flight=40", "routing.max_in_flight_per_engine=64"), 40),
    ],
)
def test_engine_credits_are_the_lower_limit(overrides: tuple[str, ...], credits: int) -> None:
    """An engine takes the lesser of its own and the routing limit."""
    assert make(*overrides).engines[0].settings["credits"] == credits


def test_auto_is_one_engine_per_gpu() -> None:
    """engine.count=auto gives each visible GPU an engine."""
    assert devices(make(on=machine(gpus=3))) == ["0", "1", "2"]


def test_auto_with_tensor_parallelism_is_one_engine_per_slice() -> None:
    """Slices are contiguous; a rest too small for a slice stays free."""
    assert devices(make("engine.tensor_parallel_size=2", on=machine(gpus=5))) == ["0,1", "2,3"]


def test_order_and_uuids_of_engine_gpus_are_kept() -> None:
    """The names go into CUDA_VISIBLE_DEVICES as the user wrote them, in that order."""
    made = make("engine.gpus=[3,GPU-0aaa,2,1]", "engine.tensor_parallel_size=2", on=machine(gpus=4))
    assert devices(made) == ["3,GPU-0aaa", "2,1"]


def test_existing_cuda_visible_devices_is_honoured() -> None:
    """Only what the environment lets us see is given to engines."""
    seen = Machine(8, 24 * 10**9, Gpus.visible("5,2", UUIDS))
    assert devices(make(on=seen)) == ["5", "2"]


def test_more_engines_than_gpus_is_refused_with_both_numbers() -> None:
    """The message says how many GPUs are needed and how many there are."""
    with pytest.raises(ConfigError, match=r"engine.count=3 .*tensor_parallel_size=2 needs 6 GPUs, 4 can be used"):
        make("engine.count=3", "engine.tensor_parallel_size=2", on=machine(gpus=4))


def test_a_slice_wider_than_the_machine_is_refused() -> None:
    """auto cannot make a slice of four from two."""
    with pytest.raises(ConfigError, match=r"needs 4 GPUs, 2 can be used"):
        make("engine.tensor_parallel_size=4", on=machine(gpus=2))


def test_unknown_gpu_is_refused() -> None:
    """A device that is not visible is named, with those that are."""
    with pytest.raises(ConfigError, match=r"engine.gpus names '7'.*visible GPUs are: 0, 1"):
        make("engine.gpus=[7]", on=machine(gpus=2))


def test_gpus_on_a_machine_without_any_are_refused() -> None:
    """Asking for devices where none is, is an error rather than a CPU run."""
    with pytest.raises(ConfigError, match=r"engine.gpus names '0'.*none"):
        make("engine.gpus=[0]")


def test_no_gpus_at_all_is_no_way_to_ask_for_a_cpu() -> None:
    """An empty engine.gpus is refused."""
    with pytest.raises(ConfigError, match=r"engine.gpus is empty"):
        make("engine.gpus=[]", on=machine(gpus=2))


def test_tensor_parallelism_on_a_cpu_is_refused() -> None:
    """SGLang's CPU ranks would only share the same cores."""
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel_size=2 needs GPUs"):
        make("engine.tensor_parallel_size=2")


@pytest.mark.parametrize(("memory_gb", "engines"), [(5.1, 1), (9.9, 1), (10.1, 2), (400, 2)])
def test_auto_on_a_cpu_is_what_memory_allows_at_most_two(memory_gb: float, engines: int) -> None:
    """Five GB each."""
    assert devices(make(on=machine(memory_gb=memory_gb))) == [""] * engines


@pytest.mark.parametrize(("asked", "memory_gb"), [("4", 19.0), ("auto", 3.0)])
def test_too_little_memory_is_refused_with_the_figures(asked: str, memory_gb: float) -> None:
    """The message has the need and what is there."""
    with pytest.raises(ConfigError, match=rf"need about (20|5).0 GB of memory, {memory_gb} GB are available"):
        make(f"engine.count={asked}", on=machine(memory_gb=memory_gb))


def test_cores_are_shared_out_among_engines() -> None:
    """Each rank gets its share of the cores, at least one."""
    assert make(on=machine(cores=9)).engines[0].env["OMP_NUM_THREADS"] == "4"
    assert make(on=machine(cores=1)).engines[0].env["OMP_NUM_THREADS"] == "1"
    wide = make("engine.tensor_parallel_size=4", on=machine(gpus=8, cores=64))
    assert wide.engines[0].env["OMP_NUM_THREADS"] == "8"


def test_engines_leave_temporary_files_in_the_run_directory() -> None:
    """SGLang's sockets go with the run; what torch compiled does not; torchrun's store is not waited for."""
    env = make().engines[0].env
    assert (env["TMPDIR"], env["TORCHINDUCTOR_CACHE_DIR"]) == ("/run/z/t", "/cache/inductor")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert "TMPDIR" not in make().workers[0].env


def test_simulated_engines_need_neither_gpus_nor_memory() -> None:
    """Two by default, any number if asked, no ports taken, devices left alone."""
    made = make("engine.kind=sim", on=machine(memory_gb=1))
    assert len(made.engines) == 2
    assert [e.ports for e in made.engines] == [None, None]
    assert "CUDA_VISIBLE_DEVICES" not in made.engines[0].env
    assert len(make("engine.kind=sim", "engine.count=64", on=machine(memory_gb=1)).engines) == 64


def test_simulated_engines_share_processes() -> None:
    """sim.per_process members live in one process; the last one takes the rest."""
    made = make("engine.kind=sim", "engine.count=5", "engine.sim.per_process=2")
    assert [e.name for e in made.engines] == ["engine-0-to-1", "engine-2-to-3", "engine-4"]
    assert [[m.name for m in e.members] for e in made.engines] == [
        ["engine-0", "engine-1"],
        ["engine-2", "engine-3"],
        ["engine-4"],
    ]
    assert [len(e.settings["members"]) for e in made.engines] == [2, 2, 1]


@pytest.mark.parametrize(
    ("overrides", "context"),
    [
        ((), "1500 tokens"),
        (("engine.args.context_length=1200",), "1200 tokens (engine.args.context_length)"),
        (("engine.kind=sim", "engine.sim.context_length=2047"), "2047 tokens (engine.sim.context_length)"),
    ],
)
def test_rows_beyond_the_context_are_refused_with_the_three_numbers(overrides: Any, context: str) -> None:
    """P + R must fit what the engines will really take."""
    with pytest.raises(ConfigError) as refused:
        make(*overrides, context=1500)
    assert "prompt_length=1024 + rollout.response_length=1024" in str(refused.value)
    assert context in str(refused.value)


def test_rows_that_just_fit_and_unknown_contexts_pass() -> None:
    """P + R equal to the context is fine; a model that does not say is not second-guessed."""
    assert make(context=2048).workers[0].settings["context_length"] == 2048
    assert make(context=None).workers[0].settings["context_length"] is None
    assert make("engine.kind=sim", context=10).workers[0].settings["context_length"] == 131_072


def test_only_engines_run_under_another_interpreter() -> None:
    """Real and simulated ones; workers and broker stay with the launcher."""
    for kind in ("sglang", "sim"):
        made = make("engine.python=/env/bin/python", f"engine.kind={kind}")
        assert {engine.python for engine in made.engines} == {"/env/bin/python"}
        assert {child.python for child in (made.broker, *made.workers)} == {""}
        assert {engine.python for engine in make(f"engine.kind={kind}").engines} == {""}
