"""The model, and the engines that serve it."""

from __future__ import annotations

import os
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zagent.config.section import Section


class ModelConfig(Section):
    """Which model, and how its tokenizer is loaded."""

    #: A directory, a hub id, or a built-in name: `smollm2-135m`, `tiny` (calls a calculator), `tiny-early`.
    path: str = "smollm2-135m"
    #: Where the tokenizer lies, if not beside the model.
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    #: Load the tokenizer with transformers' AutoTokenizer in workers too. It pulls torch in (770 MB, 4 to 6 s per
    #: process against 65 MB and half a second); needed only for tokenizers without a `tokenizer.json`.
    use_auto_tokenizer: bool = False


class SimConfig(Section):
    """The simulated engine: real protocol, invented tokens. Speeds are per sequence; 0 = no latency."""

    prefill_tokens_per_s: float = Field(0.0, ge=0)
    decode_tokens_per_s: float = Field(0.0, ge=0)
    #: Sequences that decode at once; more wait in the engine.
    max_batch: int = Field(256, ge=1)
    #: Tokens the prefix cache holds; 0 = no prefix cache.
    kv_capacity_tokens: int = Field(1_000_000, ge=0)
    #: Default: the model's, so that the workers' tokenizer knows every id; 32 000 where there is no model.
    vocab_size: int | None = Field(None, ge=32, le=2**20)
    context_length: int = Field(131_072, ge=2)
    #: Chance per token of ending the answer (the id `eos_token_id`); 0 = always run to the token limit.
    eos_probability: float = Field(0.0, ge=0, le=1)
    eos_token_id: int = Field(2, ge=0)
    #: Placeholder of an image. Default: the model's, so that a model without eyes takes no images.
    image_token_id: int | None = Field(None, ge=0)
    #: Tokens that each image becomes. Workers count what the model's processor makes of the image: use images of a size
    #: that gives this many.
    tokens_per_image: int = Field(64, ge=1)
    #: Layers whose routed experts are returned with each answer; 0 = a dense model, without any.
    moe_layers: int = Field(0, ge=0)
    #: Experts per layer (ids are int16), and how many of them each token is routed to.
    experts: int = Field(64, ge=1, le=2**15)
    experts_per_token: int = Field(8, ge=1)
    #: Of the invented tokens, beside each call's own seed.
    seed: int = 0
    #: Fault script, see docs/simulated-engine.md.
    faults: tuple[dict[str, Any], ...] = ()
    #: Simulated engines hosted by one process.
    per_process: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} of only experts={self.experts}")
        return self


#: Engine arguments that zagent sets itself.
OWNED_ENGINE_ARGS = frozenset(
    (
        *("model_path", "tokenizer_path", "trust_remote_code", "skip_tokenizer_init", "weight_version"),
        *("host", "port", "nccl_port", "dist_init_addr", "device", "base_gpu_id", "gpu_id_step"),
        *("tp_size", "tensor_parallel_size", "dp_size", "data_parallel_size", "pp_size", "nnodes", "node_rank"),
        *("random_seed", "custom_sigquit_handler", "sleep_on_idle", "allow_auto_truncate"),
        *("stream_interval", "incremental_streaming_output"),
    )
)


class EngineConfig(Section):
    """The engine pool."""

    kind: Literal["sglang", "sim"] = "sglang"
    #: Engines to start. `auto`: one per GPU slice; on a CPU what memory allows (5 GB each), at most 2.
    count: int | Literal["auto"] = "auto"
    tensor_parallel_size: int = Field(1, ge=1)
    #: Devices engines may use (indices or UUIDs, order kept); default: all that are visible.
    gpus: tuple[str, ...] | None = None
    #: The interpreter of another environment to run the engines under: its `bin/python`. There sglang and this version
    #: of zagent are installed; here sglang need not be. Of a service's engines: by default the policy's.
    python: str | None = Field(None, min_length=1)
    #: Passed to SGLang's ServerArgs as they are.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Calls one engine is given at once; SGLang batches and queues among them.
    #: `routing.max_in_flight_per_engine` lowers it.
    max_in_flight: int = Field(512, ge=1)
    #: Tokens after which an engine tells a call's caller what it has sampled, so that the call goes on from there if
    #: the engine is lost; 0 = never: such a call starts afresh. Each time costs a message, so not below 32 or so. Calls
    #: with penalties, grammars, stop strings or `min_new_tokens` start afresh in any case: they cannot go on exactly.
    checkpoint_tokens: int = Field(0, ge=0)
    #: Seconds without a sign of SGLang's scheduler (it answers between two steps) after which the engine counts as
    #: dead; 0 = never. Above the longest single step: a compilation, say.
    hung_after_s: float = Field(120.0, ge=0)
    #: `hybrid`: the engines share the trainer's GPUs, and `sleep` releases weights and KV; `standalone`: GPUs of their
    #: own, `sleep` releases KV alone. On a CPU nothing is released.
    mode: Literal["standalone", "hybrid"] = "standalone"
    #: Directory for weights on their way to the engines, which all hosts must see; default: in shared memory. The
    #: latest stay there for engines that start again.
    weights_dir: str | None = None
    #: Seconds that new weights may take in an engine; before that, that calls may take to end, and an engine to come
    #: where none is there.
    update_timeout_s: float = Field(600.0, gt=0)
    sim: SimConfig = SimConfig()

    @field_validator("gpus", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return [str(v) for v in value] if isinstance(value, (list, tuple)) else value

    @field_validator("python")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Relative paths are the caller's. Not resolved: an environment's interpreter is a link out of it."""
        return None if value is None else os.path.abspath(os.path.expanduser(value))

    @field_validator("count")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @field_validator("args")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in OWNED_ENGINE_ARGS:
                raise ValueError(f"may not set {key!r}: zagent owns it")
        return value
