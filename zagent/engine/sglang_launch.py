"""SGLang 0.5.23 is started here, asked for its facts, and cleared away. With `sglang_engine`, all that knows its
internals."""

from __future__ import annotations

import functools
import os
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, get_type_hints

from zagent.config import EngineConfig
from zagent.engine import sglang_calls as calls
from zagent.engine.base import EngineInfo
from zagent.errors import ConfigError
from zagent.loops.tokenizer import probe

#: Seconds that SGLang's processes get to vanish after their SIGKILL.
CLOSE_TIMEOUT_S = 15.0


def launch(arguments: dict[str, Any], engine: EngineConfig) -> Any:
    """SGLang's `Engine`. Raises `ConfigError` for an argument that it does not know, and whatever it raises itself."""
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.server_args import ServerArgs

    for key in engine.args:
        if key not in ServerArgs.__struct_fields__:
            raise ConfigError(f"engine.args has unknown key {key!r}{calls.nearest(key, ServerArgs.__struct_fields__)}")
    engine_module.kill_process_tree = kill_descendants
    _name_shared_memory()
    return engine_module.Engine(**arguments)


def converters() -> calls.Converters:
    """SGLang's public sampling parameters, with checks by the types its scheduler decodes them with."""
    import msgspec
    from sglang.srt.sampling.sampling_params import SamplingParams

    def convert(hint: Any, value: Any) -> Any:
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    fields = SamplingParams.__struct_fields__
    public = fields[: fields.index("stop_strs")]  # what follows are results of its normalisation
    hints = get_type_hints(SamplingParams)
    return {name: functools.partial(convert, hints[name]) for name in public if name not in calls.REFUSED_PARAMETERS}


def info_of(engine: Any) -> EngineInfo:
    manager = engine.tokenizer_manager
    capacity = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    context = min(manager.context_len, capacity)
    placeholders = getattr(manager.mm_processor, "mm_tokens", None)
    return EngineInfo(
        vocab_size=manager.model_config.vocab_size,
        context_length=context,
        # The scheduler takes prompts shorter than max_req_input_len, which is context - 6 unless drafts need more.
        reserved_tokens=max(0, context - 1 - manager.max_req_input_len) + manager.num_reserved_tokens,
        tokenizer_probe=probe(manager.tokenizer) if manager.tokenizer is not None else "",
        image_token_id=getattr(placeholders, "image_token_id", None),
        video_token_id=getattr(placeholders, "video_token_id", None),
        pids=tuple(engine.get_all_child_pids()),
    )


def kill_descendants(pid: int = 0, **options: Any) -> None:
    """SGLang's `kill_process_tree`, sparing Python's resource tracker, which removes the semaphores of the killed."""
    from sglang.srt.utils import kill_process_tree

    options = {"include_parent": False, "wait_timeout": CLOSE_TIMEOUT_S, **options}
    kill_process_tree(pid or os.getpid(), skip_pid=getattr(resource_tracker._resource_tracker, "_pid", None), **options)


def _name_shared_memory() -> None:
    """SGLang's file in /dev/shm gets a name with the run's id, so that the launcher finds it where SGLang could not
    remove it: a failed start, SIGKILL."""
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def named(*args: Any, **options: Any) -> Any:
        ports = init_new(*args, **options)
        ports.instance_id = f"{os.environ.get('ZAGENT_RUN_ID', 'no-run')}-{ports.instance_id}"
        return ports

    PortArgs.init_new = staticmethod(named)


def remove_shared_memory(engine: Any) -> None:
    from sglang.srt.managers.load_snapshot import shm_path_for

    Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)
