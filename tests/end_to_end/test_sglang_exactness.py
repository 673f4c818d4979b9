"""A real SGLang engine on the CPU against transformers; its manners when calls are wrong, or it is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import real_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactness")


@pytest.fixture(scope="module")
def engine(directory: Path) -> dict[str, Any]:
    """What one engine said and did in all scenarios."""
    (directory / "tmp").mkdir()
    real_model.run("engine", str(directory / "engine.json"), temporary=directory / "tmp")
    facts: dict[str, Any] = json.loads((directory / "engine.json").read_text())
    return facts


@pytest.fixture(scope="module")
def reference(directory: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """What transformers says about the engine's ids, in float32."""
    real_model.run("reference", str(directory / "engine.json"), str(directory / "reference.json"), temporary=directory)
    facts: dict[str, Any] = json.loads((directory / "reference.json").read_text())
    return facts


def differences(calls: list[dict[str, Any]], expected: list[list[float]]) -> np.ndarray:
    pairs = zip(calls, expected, strict=True)
    return np.concatenate([np.abs(np.array(call["log_probs"]) - np.array(values)) for call, values in pairs])


def test_greedy_tokens_equal_those_of_transformers(engine: dict[str, Any], reference: dict[str, Any]) -> None:
    """The first 16 greedy tokens of five prompts are transformers' own."""
    assert [call["ids"] for call in engine["greedy"]] == reference["greedy"]
    assert len(reference["greedy"]) == 5


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_log_probabilities_equal_those_of_transformers(
    engine: dict[str, Any], reference: dict[str, Any], temperature: str
) -> None:
    """Log-probabilities differ by less than 1e-3 from log_softmax(logits / T) of a forward over the same ids."""
    found = differences(engine["sampled"][temperature], reference["sampled"][temperature])
    assert found.size > 50
    assert found.max() < 1e-3


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_comparison_notices_a_shift_by_one(engine: dict[str, Any], reference: dict[str, Any], temperature: str) -> None:
    """The same comparison at the position before fails by a wide margin."""
    found = differences(engine["sampled"][temperature], reference["shifted"][temperature])
    assert np.median(found) > 0.1
    assert found.max() > 1.0


def test_answers_are_int32_and_float32_with_one_version(engine: dict[str, Any]) -> None:
    """Every answer has int32 ids, float32 log-probabilities and version 0 over all its tokens."""
    for call in engine["greedy"]:
        assert call["dtypes"] == ["int32", "float32"]
        assert call["versions"] == [[0, 0, len(call["ids"])]]


def test_what_is_told_on_the_way_is_the_answer(engine: dict[str, Any]) -> None:
    """Ids and log-probabilities are those of the answer's first tokens, at least eight at a time and never the last,
    with their versions; and the answer is that of a call that is not streamed."""
    streamed = engine["streamed"]
    for call in [*streamed["answers"], streamed["longest"]]:
        told = sum(call["sizes"])
        assert (call["told"], call["told_log_probs"]) == (call["ids"][:told], call["log_probs"][:told])
        assert told < len(call["ids"])
        assert all(size >= real_model.CHECKPOINT_TOKENS for size in call["sizes"])
        assert call["told_versions"] == [[[0, 0, size]] for size in call["sizes"]]
    assert len(streamed["longest"]["sizes"]) >= 4
    assert [call["ids"] for call in streamed["answers"]] == [call["ids"] for call in engine["greedy"]]


def test_a_streamed_call_is_refused_like_any_other(engine: dict[str, Any]) -> None:
    """What SGLang's scheduler refuses is an answer there, and an error here."""
    assert [kind for kind, _ in engine["streamed"]["refused"]] == ["InvalidRequest"]


def test_light_tokenizer_equals_the_engines(engine: dict[str, Any]) -> None:
    """The probe of the tokenizer without torch equals that of SGLang's own."""
    light, own = engine["probes"]
    assert light == own != ""


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("outside", "InvalidRequest", "outside the vocabulary"),
        ("negative", "InvalidRequest", "outside the vocabulary"),
        ("empty", "InvalidRequest", "empty"),
        ("unknown", "InvalidRequest", "'max_tokens' is unknown, did you mean 'max_new_tokens'?"),
        ("too_long", "PromptTooLong", "does not fit the context of 2048"),
        ("wrong_type", "InvalidRequest", "ignore_eos='yes'"),
        ("temperature", "InvalidRequest", "temperature"),
        ("stop_id", "InvalidRequest", "stop_token_ids"),
        ("regex", "InvalidRequest", "regex"),
        ("stop_regex", "InvalidRequest", "unterminated subpattern"),
        ("image", "InvalidRequest", "takes no images"),
    ],
)
def test_wrong_call_fails_alone(engine: dict[str, Any], case: str, kind: str, text: str) -> None:
    """A call that is wrong gets a typed error naming what is wrong."""
    assert engine["refused"][case][0] == kind
    assert text in engine["refused"][case][1]


def test_engine_serves_on_after_wrong_calls(engine: dict[str, Any]) -> None:
    """After all the wrong calls the engine holds none of them and answers; a seed it cannot honour is no error."""
    assert len(engine["refused"]["seed"]["ids"]) == 2
    assert engine["refused"]["in_flight"] == 0


def test_call_for_no_tokens_is_empty(engine: dict[str, Any]) -> None:
    """max_new_tokens 0 gives no token, no log-probability and reason length."""
    answer = engine["refused"]["nothing_asked"]
    assert (answer["ids"], answer["log_probs"], answer["stop"]) == ([], [], "length")


def test_longest_prompt_that_passes_the_check_is_served(engine: dict[str, Any]) -> None:
    """A prompt that just passes `check_prompt` is answered: SGLang's own limits are not tighter."""
    assert engine["refused"]["longest"][0] >= 1


def test_cancelled_call_is_aborted_in_the_engine(engine: dict[str, Any]) -> None:
    """Cancelling a call mid-generation empties the engine, and the engine serves on."""
    found = engine["cancelled"]
    assert (found["during"], found["after"], found["raised"]) == (1, 0, "CancelledError")
    assert len(found["next"]["ids"]) == 3


def test_second_turn_reuses_the_first(engine: dict[str, Any]) -> None:
    """The second turn's cached tokens cover the first turn, but for its last token, which was never fed back."""
    first, second = engine["turns"]["first"], engine["turns"]["second"]
    assert second["cached"] >= len(first["prompt"]) + len(first["ids"]) - 1


def test_cleared_cache_is_empty_and_usable(engine: dict[str, Any]) -> None:
    """After clear_cache the same call finds nothing cached, and is answered."""
    assert engine["turns"]["cleared"]["cached"] == 0
    assert len(engine["turns"]["cleared"]["ids"]) >= 1


def test_idle_engine_sleeps(engine: dict[str, Any]) -> None:
    """SGLang's processes use less than a tenth of a core while nothing is asked; polling takes a whole one."""
    assert engine["idle"] < 0.1


def test_signals_stay_with_the_process(engine: dict[str, Any]) -> None:
    """A SIGTERM handler from before the first call is still the one that runs, and SGLang ignores the signal."""
    assert engine["signals"]["sigterm"] == ["SIGTERM"]
    assert engine["signals"]["alive"]


def test_sigquit_of_a_child_is_a_death_and_no_suicide(engine: dict[str, Any]) -> None:
    """SGLang's children report failures by SIGQUIT: it resolves `died`, and the process lives on to say so."""
    assert engine["signals"]["sigquit"] == ["a process of SGLang reported a failure", True]


def test_a_stopped_scheduler_is_noticed(engine: dict[str, Any]) -> None:
    """It answers while it is idle and while it works. Stopped, it is dead after the limit, and no call is to blame."""
    found = engine["silent"]
    assert found["well"]
    assert found["death"][0].endswith("of SGLang has been stopped for 8 s")
    assert found["death"][1] is False
    assert 6 < found["seconds"] < 20
    assert len(found["next"]["ids"]) == 3


def test_death_of_the_scheduler_is_noticed(engine: dict[str, Any]) -> None:
    """SIGKILL of the scheduler resolves `died` within a second, as a death from outside; calls fail instead of waiting
    for ever. The engine's process can end within another half."""
    found = engine["killed"]
    assert found["seconds"] < 1.0
    reason, crashed = found["death"]
    assert "was killed by signal 9" in reason
    assert not crashed
    assert found["pending"] == found["next"] == ["EngineError", f"the engine died: {reason}"]
    assert found["in_flight"] == 0
    print(f"SGLang closed {engine['closed']['seconds']:.2f} s after its death")


def test_close_leaves_no_process(engine: dict[str, Any]) -> None:
    """After close, also after a death and when called twice, none of SGLang's processes is left."""
    assert engine["closed"]["left"] == []


def test_nothing_is_left_of_an_engine(engine: dict[str, Any], directory: Path) -> None:
    """No socket, no temporary directory of SGLang and no shared memory outlives the engine's process."""
    left = [path.name for path in (directory / "tmp").iterdir() if not path.name.startswith(("torchinductor_", "root"))]
    assert left == []
    assert any("sem." in path for path in engine["shared_memory"])
    deadline = time.monotonic() + 5  # Python's resource tracker removes them when the process has ended
    while any(Path(path).exists() for path in engine["shared_memory"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path for path in engine["shared_memory"] if Path(path).exists()] == []


def test_misspelt_engine_argument_is_named(engine: dict[str, Any]) -> None:
    """An argument SGLang does not know fails before it starts, with the nearest valid name."""
    assert "'max_runing_requests', did you mean 'max_running_requests'?" in engine["misspelt"]
