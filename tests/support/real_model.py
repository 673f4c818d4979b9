"""One real engine, and transformers as its judge, each in a process of its own.

``python real_model.py engine OUT`` starts the engine, puts it through every scenario and writes what it saw as JSON;
``python real_model.py reference IN OUT`` reads that, and writes what transformers says about the same ids in float32.
An engine needs its own process: its end kills all descendants of the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Name three animals.",
)
GREEDY_TOKENS = 16
CHECKPOINT_TOKENS = 8
TEMPERATURES = (1.0, 0.7)


def run(*arguments: str, temporary: Path, timeout: float = 200) -> None:
    """This file as a script, with its own directory for temporary files; fails with the end of what it printed."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stderr[-4000:]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Bench:
    """The engine under test, with the calls that the scenarios share."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.engine, self.tokenizer, self.calls = engine, tokenizer, 0

    def prompt(self, question: str) -> list[int]:
        message = {"role": "user", "content": question}
        return list(self.tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"])

    async def call(self, ids: list[int], progress: Any = None, **params: Any) -> dict[str, Any]:
        from zagent.engine.base import GenerateRequest

        self.calls += 1
        request = GenerateRequest(f"{self.calls:032x}", np.asarray(ids, np.int32), {"logprobs": True, **params})
        output = await self.engine.generate(request, progress)
        return {
            "prompt": ids,
            "ids": output.token_ids.tolist(),
            "dtypes": [str(output.token_ids.dtype), str(output.log_probs.dtype)],
            "log_probs": output.log_probs.tolist(),
            "stop": output.stop_reason,
            "cached": output.cached_tokens,
            "versions": output.versions,
        }

    async def error_of(self, ids: list[int], **params: Any) -> list[str]:
        try:
            return ["no error", str(await self.call(ids, **params))]
        except Exception as error:
            return [type(error).__name__, str(error)]


async def greedy(bench: Bench) -> Any:
    calls = (bench.call(bench.prompt(text), temperature=0.0, max_new_tokens=GREEDY_TOKENS) for text in QUESTIONS)
    return await asyncio.gather(*calls)


async def streamed(bench: Bench) -> Any:
    """The same calls, with what is told of them on the way; the last ones are refused by SGLang itself."""

    async def one(text: str, **params: Any) -> dict[str, Any]:
        told: list[Any] = []
        call = await bench.call(bench.prompt(text), told.append, temperature=0.0, **params)
        sizes, versions = [len(piece.token_ids) for piece in told], [piece.versions for piece in told]
        ids = [token for piece in told for token in piece.token_ids.tolist()]
        log_probs = [value for piece in told for value in piece.log_probs.tolist()]
        return {**call, "sizes": sizes, "told": ids, "told_log_probs": log_probs, "told_versions": versions}

    answers = await asyncio.gather(*(one(text, max_new_tokens=GREEDY_TOKENS) for text in QUESTIONS))
    longest = await one(QUESTIONS[0], max_new_tokens=60, ignore_eos=True)
    asked = bench.prompt("Hi")
    refused = [await bench.error_of(asked, progress=print, regex="(", max_new_tokens=20)]
    return {"answers": answers, "longest": longest, "refused": refused}


async def sampled(bench: Bench) -> Any:
    """All at once, so that requests are batched and prefixes shared."""
    return {
        temperature: await asyncio.gather(
            *(bench.call(bench.prompt(text), temperature=temperature, max_new_tokens=40) for text in QUESTIONS)
        )
        for temperature in TEMPERATURES
    }


async def refused(bench: Bench) -> Any:
    """Calls that would harm the engine or are wrong, and one good call after them."""
    ids = bench.prompt("Hello")
    outside = bench.engine.info.vocab_size
    return {
        "outside": await bench.error_of([*ids, outside], max_new_tokens=4),
        "negative": await bench.error_of([-1], max_new_tokens=4),
        "empty": await bench.error_of([], max_new_tokens=4),
        "unknown": await bench.error_of(ids, max_tokens=4),
        "too_long": await bench.error_of([1] * bench.engine.info.context_length, max_new_tokens=4),
        "wrong_type": await bench.error_of(ids, ignore_eos="yes", max_new_tokens=4),
        "temperature": await bench.error_of(ids, temperature=-1.0, max_new_tokens=4),
        "stop_id": await bench.error_of(ids, stop_token_ids=[outside], min_new_tokens=2, max_new_tokens=4),
        "regex": await bench.error_of(ids, regex="(", max_new_tokens=4),
        "stop_regex": await bench.error_of(ids, stop_regex="(", max_new_tokens=4),
        "image": await image_error(bench, ids),
        "nothing_asked": await bench.call(ids, max_new_tokens=0),
        "seed": await bench.call(ids, sampling_seed=7, max_new_tokens=2),
        "longest": [len((await bench.call([1] * longest_prompt(bench), max_new_tokens=10**9))["ids"])],
        "in_flight": bench.engine.in_flight(),
    }


def longest_prompt(bench: Bench) -> int:
    info = bench.engine.info
    return int(info.context_length - info.reserved_tokens - 2)


async def image_error(bench: Bench, ids: list[int]) -> list[str]:
    from zagent.engine.base import GenerateRequest

    try:
        await bench.engine.generate(GenerateRequest("f" * 32, np.asarray(ids, np.int32), {}, images=[b"png"]))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


async def cancelled(bench: Bench) -> Any:
    """A call cancelled while it decodes: what the engine counts, and a call after it."""
    ids = bench.prompt("Tell me a long story.")
    task = asyncio.ensure_future(bench.call(ids, max_new_tokens=1900, ignore_eos=True))
    await asyncio.sleep(1.0)
    during = bench.engine.in_flight()
    task.cancel()
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    deadline = time.monotonic() + 10
    while bench.engine.in_flight() and time.monotonic() < deadline:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.02)
    after = bench.engine.in_flight()
    following = await bench.call(ids, max_new_tokens=3)
    return {"during": during, "after": after, "raised": type(outcome).__name__, "next": following}


async def turns(bench: Bench) -> Any:
    """Two turns of a conversation, and the second again when the cache has been cleared."""
    first = await bench.call(bench.prompt("What is the largest planet?"), max_new_tokens=24, ignore_eos=True)
    ids = first["prompt"] + first["ids"] + bench.prompt("And the smallest?")
    second = await bench.call(ids, max_new_tokens=4)
    await bench.engine.clear_cache()
    return {"first": first, "second": second, "cleared": await bench.call(ids, max_new_tokens=4)}


async def idle(bench: Bench) -> float:
    """Seconds of processor time that SGLang's processes use in one second without a call."""
    await asyncio.sleep(0.5)
    before = cpu_seconds(bench.engine.info.pids)
    await asyncio.sleep(1.0)
    return cpu_seconds(bench.engine.info.pids) - before


def cpu_seconds(pids: tuple[int, ...]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


async def signals(bench: Bench, received: list[str]) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    alive = not bench.engine.died.done()
    os.kill(os.getpid(), signal.SIGQUIT)
    reason = await asyncio.wait_for(asyncio.shield(bench.engine.died), 10)
    bench.engine._life.died = asyncio.get_running_loop().create_future()  # nothing is really broken: used once more
    bench.engine._life.died.add_done_callback(lambda _: bench.engine._abandon_calls())
    return {"sigterm": list(received), "alive": alive, "sigquit": reason}


async def silent(bench: Bench) -> Any:
    """A second pair of eyes, which waits for 8 s only: on a scheduler that is idle, busy, and stopped."""
    from zagent.engine.sglang_life import Life

    life = Life(bench.engine.info.pids, 8.0)
    life.start(bench.engine._manager.get_internal_state)
    await asyncio.sleep(2.5)
    await bench.call(bench.prompt("Tell me a long story."), max_new_tokens=100, ignore_eos=True)
    well = not life.died.done()
    os.kill(bench.engine.info.pids[0], signal.SIGSTOP)
    pending = asyncio.ensure_future(bench.call(bench.prompt("Hi"), max_new_tokens=3, ignore_eos=True))
    start = time.monotonic()
    death = await asyncio.wait_for(asyncio.shield(life.died), 40)
    os.kill(bench.engine.info.pids[0], signal.SIGCONT)
    seconds = time.monotonic() - start
    life.stop()
    return {"well": well, "death": death, "seconds": seconds, "next": await asyncio.wait_for(pending, 10)}


async def killed(bench: Bench) -> Any:
    """The scheduler dies under a call."""
    pending = asyncio.ensure_future(bench.error_of(bench.prompt("Hi"), max_new_tokens=1900, ignore_eos=True))
    await asyncio.sleep(0.5)
    start = time.monotonic()
    os.kill(bench.engine.info.pids[0], signal.SIGKILL)
    death = await asyncio.wait_for(asyncio.shield(bench.engine.died), 10)
    return {
        "death": death,
        "seconds": time.monotonic() - start,
        "pending": await asyncio.wait_for(pending, 10),
        "next": await asyncio.wait_for(bench.error_of(bench.prompt("Hi"), max_new_tokens=2), 10),
        "in_flight": bench.engine.in_flight(),
    }


async def closed(bench: Bench) -> Any:
    start = time.monotonic()
    await asyncio.wait_for(bench.engine.close(), 20)
    await bench.engine.close()
    return {"seconds": time.monotonic() - start, "left": [pid for pid in bench.engine.info.pids if is_there(pid)]}


def shared_memory(pids: tuple[int, ...]) -> list[str]:
    """Files in shared memory that these processes have mapped: semaphores, load reports."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return sorted(set(re.findall(r"/dev/shm/\S+", maps)))


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def scenarios(engine: Any, model_path: str) -> dict[str, Any]:
    from zagent.loops.tokenizer import load_tokenizer, probe

    received: list[str] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.append, "SIGTERM")
    await engine.start()
    bench = Bench(engine, load_tokenizer(model_path))
    facts: dict[str, Any] = {"probes": [probe(bench.tokenizer), engine.info.tokenizer_probe]}
    for scenario in (greedy, streamed, sampled, refused, cancelled, turns, idle):
        facts[scenario.__name__] = await asyncio.wait_for(scenario(bench), 60)
    facts["signals"] = await signals(bench, received)
    facts["silent"] = await silent(bench)
    facts["shared_memory"] = shared_memory((os.getpid(), *engine.info.pids))
    facts["killed"] = await killed(bench)
    facts["closed"] = await closed(bench)
    return facts


def run_engine(out: str) -> None:
    from zagent.config import EngineConfig, ModelConfig
    from zagent.engine import sglang_engine
    from zagent.errors import ConfigError
    from zagent.models import resolve

    def build(**args: Any) -> Any:
        ports = {"nccl_port": free_port(), "port": free_port()}
        config = EngineConfig(args=args, checkpoint_tokens=CHECKPOINT_TOKENS)
        return sglang_engine.build(model=ModelConfig(), engine=config, index=0, seed=1, **ports)

    try:
        build(max_runing_requests=4)
        misspelt = "no error"
    except ConfigError as error:
        misspelt = str(error)
    start = time.monotonic()
    engine = build(context_length=2048)  # a whole context is prefilled in a scenario
    facts = {"misspelt": misspelt, "start_s": time.monotonic() - start}
    facts |= asyncio.run(scenarios(engine, resolve("smollm2-135m")))
    Path(out).write_text(json.dumps(facts))


def run_reference(facts_file: str, out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from zagent.models import resolve

    facts = json.loads(Path(facts_file).read_text())
    model = AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m"), dtype=torch.float32)

    def greedy_ids(call: dict[str, Any]) -> list[int]:
        prompt = torch.tensor([call["prompt"]])
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=GREEDY_TOKENS
        )
        return list(made[0, len(call["prompt"]) :].tolist())

    def log_probs(call: dict[str, Any], temperature: float, shift: int = 0) -> list[float]:
        """Of each response token, given what stands before it; ``shift`` looks at the wrong position."""
        ids = torch.tensor([call["prompt"] + call["ids"]])
        rows = torch.log_softmax(model(ids).logits[0].double() / temperature, dim=-1)
        first = len(call["prompt"]) - 1 + shift
        return [float(rows[first + i, token_id]) for i, token_id in enumerate(call["ids"])]

    with torch.inference_mode():
        result = {
            "greedy": [greedy_ids(call) for call in facts["greedy"]],
            "sampled": {t: [log_probs(c, float(t)) for c in calls] for t, calls in facts["sampled"].items()},
            "shifted": {t: [log_probs(c, float(t), -1) for c in calls] for t, calls in facts["sampled"].items()},
        }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    {"engine": run_engine, "reference": run_reference}[sys.argv[1]](*sys.argv[2:])
