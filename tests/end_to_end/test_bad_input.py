"""What users get wrong ends with one error that names it; nothing hangs, nothing is left, nobody else is disturbed."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from support import bad_loops
from support.clusters import questions, sim_config, sim_overrides
from support.processes import with_run_id
from zagent import errors

BROKEN_MODULE = "import zagent\n\ndef prepare():\n    raise RuntimeError('made of cheese')\n\nprepare()\n"


class Place:
    """A directory with prompts, where the command line runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.out, self.temporary = path, path / "out.jsonl", path / "t"
        self.temporary.mkdir()
        (path / "prompts.jsonl").write_text('{"prompt": "Hi."}\n{"prompt": "Ho."}\n')
        (path / "broken.jsonl").write_text('{"prompt": "Hi."}\n{"prompt": \n')
        (path / "empty.jsonl").write_text("\n")
        (path / "broken_module.py").write_text(BROKEN_MODULE)
        (path / "plain").write_text("precious")

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A batch job; ``arguments`` win over the usual ones. Nothing of it may be left."""
        usual = ["--prompts", "prompts.jsonl", "--out", "out.jsonl", *sim_overrides(self.path)]
        done = subprocess.run(
            [sys.executable, "-m", "zagent.launch", *usual, *arguments],
            cwd=self.path,
            env={**os.environ, "TMPDIR": str(self.temporary), **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        runs = os.listdir(self.path / "logs") if (self.path / "logs").exists() else []
        assert [pid for run in runs for pid in with_run_id(run)] == []
        assert [name for name in os.listdir("/dev/shm") for run in runs if run in name] == []
        assert list(self.temporary.glob("zagent-*")) == []
        return done


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


REFUSED: dict[str, tuple[list[str], str]] = {
    "misspelt key": (["engine.cuont=2"], "unknown key 'engine.cuont', did you mean 'engine.count'"),
    "missing value": (["model.path=???"], "model.path=??? must be given"),
    "wrong type": (["worker.count=many"], "worker.count='many': should be a valid integer"),
    "no list": (["rollout.imports=broken_module"], "must be a list: rollout.imports=[broken_module]"),
    "no config file": (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
    "no model": (["model.path=/no/such/model"], "model.path='/no/such/model' does not exist"),
    "no tokenizer": (["model.tokenizer_path=/no/such"], "model.tokenizer_path='/no/such' does not exist"),
    "no architecture": (["engine.kind=sglang"], "config.json names no `architectures`"),
    "no such GPU": (["engine.kind=sglang", "engine.gpus=[97]"], "engine.gpus names '97'"),
    "too little memory": (["engine.kind=sglang", "engine.count=5000"], "engine.count=5000: 5000 engines on this CPU"),
    "beyond the context": (["engine.sim.context_length=150"], "rollout.prompt_length=128 + rollout.response_length=32"),
    "broken line": (["--prompts", "broken.jsonl"], "broken.jsonl:2: not JSON"),
    "no prompts": (["--prompts", "empty.jsonl"], "empty.jsonl: no prompts"),
    "output is a directory": (["--out", "t"], "outcomes file t cannot be written: Is a directory"),
    "output in a read-only place": (["--out", "/proc/out.jsonl"], "outcomes file /proc/out.jsonl cannot be written"),
    "output is the input": (["--out", "prompts.jsonl"], "prompts.jsonl is the prompts file"),
    "logs in a file": (["logs.dir=plain"], "set logs.dir"),
    # From here on it is a child that finds out.
    "no module": (["rollout.imports=[no_such_module]"], "No module named 'no_such_module'"),
    "unknown agent": (["rollout.agent=sinlge_turn"], "no agent loop 'sinlge_turn'; known: env_agent, single_turn"),
    "no loop file": (["rollout.agent_loop_config_path=no.yaml"], "no.yaml': No such file"),
    "no record file": (["routing.record=/no/dir/r"], "routing.record='/no/dir/r' cannot be written: No such file"),
    "no directory for the endpoint": (["broker.endpoint=ipc:///no/b"], "broker.endpoint 'ipc:///no/b' cannot be bound"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_command_line_names_it_in_one_line(case: str, place: Place) -> None:
    """Status 2, one line of error and no traceback; no outcome has been written."""
    arguments, message = REFUSED[case]
    done = place.run(*arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.endswith("starting the engines")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("zagent: ")
    assert message in said[0]
    assert not place.out.exists()
    assert done.stdout == ""


def test_a_module_that_fails_shows_its_own_traceback(place: Place) -> None:
    """The user's frames and error, none of ours."""
    done = place.run("rollout.imports=[broken_module]")
    assert done.returncode == 2
    assert "rollout.imports: 'broken_module' cannot be imported: RuntimeError: made of cheese" in done.stderr
    assert re.search(r'broken_module.py", line 4, in prepare\n.*\nRuntimeError: made of cheese\n$', done.stderr)
    assert "zagent/worker" not in done.stderr


@pytest.mark.parametrize("kind", ["tcp", "ipc", "plain file"])
def test_an_endpoint_that_is_taken_is_left_alone(kind: str, place: Place) -> None:
    """The error names it; who had it still has it."""
    with socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX) as taken:
        path = place.path / "plain" if kind == "plain file" else place.path / "s"
        if kind != "plain file":
            taken.bind(("127.0.0.1", 0) if kind == "tcp" else str(path))
            taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}" if kind == "tcp" else f"ipc://{path}"
        done = place.run(f"broker.endpoint={endpoint}", "broker.insecure=true")
        assert done.returncode == 2
        assert f"zagent: broker.endpoint '{endpoint}' cannot be bound" in done.stderr
        assert "Traceback" not in done.stderr
    assert (place.path / "plain").read_text() == "precious"


def test_a_long_temporary_directory_will_do(place: Place) -> None:
    """Sockets have short names elsewhere; an endpoint of the user's own is removed as well."""
    place.temporary = place.path / ("x" * 120)
    place.temporary.mkdir()
    with tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as short:
        done = place.run("--prompts", "broken.jsonl", "--keep-going", f"broker.endpoint=ipc://{short}/b")
        assert os.listdir(short) == []
    assert re.search(r"^skipped: broken.jsonl:2: not JSON", done.stderr, re.MULTILINE)
    assert done.returncode == 1  # a line was skipped
    assert len(place.out.read_text().splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_disk_that_fills_up_is_one_line(place: Place) -> None:
    """Status 1, for it is not the command that was wrong."""
    done = place.run("--out", "/dev/full")
    assert done.returncode == 1
    assert "zagent: outcomes file /dev/full: No space left on device, after 0 outcomes" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["rollout.agent=nobody"], errors.UnknownAgent, "no agent loop 'nobody'"),
        (["rollout.imports=[no_such_module]"], errors.ConfigError, "no_such_module"),
        (["engine.kind=sglang", "engine.gpus=[97]"], errors.ConfigError, "'97'"),
    ],
)
def test_what_is_wrong_is_raised_where_it_is_needed(
    overrides: list[str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """By `launch`, or, where only a worker finds out, by the first batch; typed, as if it had been found here. No
    process is left."""
    with pytest.raises(error, match=message), zagent.AgentLoopManager.launch(sim_config(tmp_path, *overrides)) as made:
        made.generate_sequences(questions(1))
    runs = os.listdir(tmp_path / "logs") if (tmp_path / "logs").exists() else []
    assert [pid for run in runs for pid in with_run_id(run)] == []


# ---- one cluster that survives it all -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    """Two engines and a worker that knows the bad loops."""
    config = sim_config(
        tmp_path_factory.mktemp("shared"),
        f"rollout.imports=[{bad_loops.__name__}]",
        "rollout.trajectory_timeout_s=30",
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        yield manager


@pytest.fixture(scope="module")
def runner(manager: zagent.AgentLoopManager) -> Iterator[asyncio.Runner]:
    """A trainer's own event loop, with its link open."""
    with asyncio.Runner() as runner:
        runner.run(manager.server_manager.generate("s", [1], {}))
        yield runner


@pytest.fixture(autouse=True)
def nobody_died(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared cluster its processes are the same, ready, and idle."""
    shared = "manager" in request.fixturenames
    before = members(request.getfixturevalue("manager")) if shared else {}
    yield
    if shared:
        assert members(request.getfixturevalue("manager")) == before


def members(manager: zagent.AgentLoopManager) -> dict[str, tuple[Any, ...]]:
    pools = manager.status()["pools"]
    return {name: (m["state"], m["pid"], m["in_flight"]) for pool in pools.values() for name, m in pool.items()}


ROWS: dict[str, tuple[type[Exception], str]] = {
    "raises": (ValueError, "made of cheese"),
    "exits": (errors.RemoteError, "SystemExit: 3"),
    "returns_none": (errors.LoopError, "'returns_none' returned a NoneType, not an AgentLoopOutput"),
    "is_not_async": (errors.LoopError, "'is_not_async': run must be an `async def`"),
    "takes_no_row": (TypeError, "unexpected keyword argument 'raw_prompt'"),
    "no_loop": (errors.LoopError, r"'no_loop' makes a NoLoop, which has no run\(\)"),
    "short_mask": (errors.LoopError, "'short_mask': response_mask has 1 entries, response_ids has 2"),
    "changed_later": (errors.LoopError, "'changed_later': response_mask has 2 entries, response_ids has 3"),
    "short_versions": (errors.LoopError, "rollout_versions has 1 entries, response_ids has 2"),
    "flat_experts": (errors.LoopError, "routed_experts must be an array"),
    "long_prompt": (errors.PromptTooLong, "a prompt of 500 tokens, beyond rollout.prompt_length=128"),
    "returns_a_set": (errors.EncodeError, r"extra_fields\['seen'\]: a value of type builtins.set"),
    "unknown_id": (errors.InvalidRequest, "token id 259 is outside the vocabulary of 259"),
    "negative_id": (errors.InvalidRequest, "token id -1 is outside the vocabulary"),
    "no_ids": (errors.InvalidRequest, "prompt_ids is empty"),
    "unknown_parameter": (errors.InvalidRequest, "unknown sampling parameter max_tokns"),
    "nobody": (errors.UnknownAgent, "no agent loop 'nobody'; known: "),
    "no.such.Agent": (errors.UnknownAgent, "'no.such.Agent' cannot be imported: .*No module named 'no'"),
}


@pytest.mark.parametrize("agent", ROWS)
def test_a_bad_loop_fails_its_own_row(agent: str, manager: zagent.AgentLoopManager) -> None:
    """With an error that names what is wrong; the rows beside it are answered."""
    kind, message = ROWS[agent]
    with pytest.raises(errors.RolloutError, match="1 of 3 rows failed: row 1") as caught:
        manager.generate_sequences(questions(3, agent_name=[None, agent, None]))
    assert [outcome.status for outcome in caught.value.finished] == ["ok", "failed", "ok"]
    error = caught.value.finished[1].error
    assert type(error) is kind
    assert re.search(message, str(error))


def test_a_loops_own_traceback_is_the_cause(manager: zagent.AgentLoopManager) -> None:
    """Of the process where it happened, down to the user's line."""
    [outcome] = manager.stream(questions(1, agent_name=["raises"]))
    assert outcome.error is not None
    assert re.search(r'bad_loops.py", line \d+, in raises\n', str(outcome.error.__cause__))


def test_a_prompt_that_is_too_long_fails_its_own_row(manager: zagent.AgentLoopManager) -> None:
    """The two lengths are in the error."""
    first, second = sorted(manager.stream(questions(2, lambda i: "x" * 500 * i)), key=lambda o: o.index)
    assert first.status == "ok"
    assert re.match(r"prompt of 5\d\d tokens exceeds rollout.prompt_length=128", str(second.error))
    assert isinstance(second.error, errors.PromptTooLong)


@pytest.mark.parametrize("value", [{1, 2}, object(), 2**70, "\ud800"], ids=["set", "object", "big int", "surrogate"])
def test_a_value_that_cannot_travel_fails_its_row_by_column(value: Any, manager: zagent.AgentLoopManager) -> None:
    """The column is named, and what is in it."""
    one, other = sorted(manager.stream(questions(2, extra=[value, 1])), key=lambda o: o.index)
    assert isinstance(one.error, errors.EncodeError)
    assert re.search("column 'extra': .* cannot cross the wire", str(one.error))
    assert other.status == "ok"


def unequal() -> zagent.DataProto:
    batch = questions(2)
    batch.non_tensor_batch["late"] = np.array([1])
    return batch


def raw(*prompts: Any) -> Callable[[], zagent.DataProto]:
    return lambda: zagent.DataProto(non_tensor_batch={"raw_prompt": list(prompts)})


BATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no raw_prompt": (lambda: zagent.DataProto(non_tensor_batch={"prompt": ["a"]}), "no non_tensor_batch.*raw_prompt"),
    "no batch": (lambda: {"raw_prompt": []}, "a batch is a zagent.DataProto, got dict"),
    "JSON text": (raw('[{"role": "user"}]'), "row 0: raw_prompt must be a list of chat messages"),
    "numpy text": (lambda: zagent.DataProto(non_tensor_batch={"raw_prompt": np.array(["a"])}), "row 0: raw_prompt"),
    "one conversation": (raw({"role": "user", "content": "x"}), "row 0: raw_prompt must be a list of chat messages"),
    "no messages": (raw([]), "row 0: raw_prompt must be a list of chat messages"),
    "unequal columns": (unequal, "columns differ in length: raw_prompt=2, late=1"),
    "a lock": (lambda: questions(2, lock=[threading.Lock()] * 2), "row 0: column 'lock' holds a lock"),
    "a name that is a number": (lambda: questions(2, agent_name=[5, 5]), "row 0: agent_name must be text, got 5"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_used_is_refused(case: str, manager: zagent.AgentLoopManager) -> None:
    """`InputError` that names the row or column, before anything runs."""
    make, message = BATCHES[case]
    calls = sum(engine["calls"] for engine in manager.engine_stats().values())
    with pytest.raises(errors.InputError, match=message):
        manager.generate_sequences(make())
    assert sum(engine["calls"] for engine in manager.engine_stats().values()) == calls


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [([1, 1000], {}, "token id 1000 is outside"), ([1], {"temperature": float("nan")}, "temperature must be")],
)
def test_a_trainers_own_bad_call_is_refused(
    ids: list[int], params: dict[str, Any], message: str, manager: zagent.AgentLoopManager, runner: asyncio.Runner
) -> None:
    """As `InvalidRequest`, by the engine."""
    with pytest.raises(errors.InvalidRequest, match=message):
        runner.run(manager.server_manager.generate("s", ids, params))


# ---- managers that have no cluster ----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/zagent-nobody/b", "tcp://127.0.0.1:1", "nonsense"])
def test_nobody_answers(endpoint: str) -> None:
    """`ConnectionLost` that names the endpoint, in the time that was given."""
    with pytest.raises(errors.ConnectionLost, match=f"no cluster at '{endpoint}'"):
        zagent.AgentLoopManager.connect(endpoint, timeout=0.2)


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    """Every method; and the socket of its own is gone."""
    manager = zagent.AgentLoopManager.launch(sim_config(tmp_path))
    path = manager.endpoint.removeprefix("ipc://")
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    manager.close()
    assert not os.path.exists(path)
    for use in (
        lambda: manager.generate_sequences(questions(1)),
        lambda: next(manager.stream(questions(1))),
        manager.status,
        lambda: asyncio.run(manager.server_manager.generate("s", [1], {})),
    ):
        with pytest.raises(errors.ConnectionLost, match=r"the manager (is|was) closed"):
            use()


def test_launch_takes_a_configuration_only() -> None:
    """A dict, as other libraries take it, is named as such."""
    with pytest.raises(errors.ConfigError, match=r"Config is needed .*got dict"):
        zagent.AgentLoopManager.launch({"engine": {}})  # type: ignore[arg-type]
