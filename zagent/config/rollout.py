"""What a trajectory is, how it is sampled, scored and traced."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zagent.config.section import Section


class ValConfig(Section):
    """Sampling for `meta_info["validate"]`: greedy."""

    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1


class MultiTurnConfig(Section):
    """Tools, interactions and the limits of a conversation (verl's `multi_turn`)."""

    #: Answers of the model in one trajectory, and answers to it (a round of tools, a user's reply); None = no limit.
    max_assistant_turns: int | None = Field(None, ge=1)
    max_user_turns: int | None = Field(None, ge=1)
    #: Tools that rows may use, by name or dotted path; None: every `@zagent.tool` that `rollout.imports` registered.
    tools: tuple[str, ...] | None = None
    #: YAML `tools: [{class_name, config, tool_schema}]`.
    tool_config_path: str | None = None
    #: Show the tools' schemas to the model through its chat template. False: the prompt describes them itself.
    tools_in_template: bool = True
    #: How the model writes tool calls: a name of `zagent.loops.parsers`, or one of SGLang's.
    format: str = "hermes"
    #: Calls of one turn that are run; more are answered as skipped.
    max_parallel_calls: int = Field(1, ge=1)
    #: Seconds per tool call.
    tool_timeout: float = Field(60.0, gt=0)
    #: Characters kept of a tool's text, and the side that is dropped beyond them.
    max_tool_response_length: int = Field(256, ge=0)
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    #: YAML `interaction: [{name, class_name, config}]`.
    interaction_config_path: str | None = None


class RolloutConfig(Section):
    """What a trajectory is, and how it is sampled."""

    agent: str = "single_turn_agent"
    #: Samples per prompt of a batch job; `generate_sequences` never multiplies rows.
    n: int = Field(1, ge=1)
    prompt_length: int = Field(1024, ge=1)
    response_length: int = Field(1024, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    calculate_log_probs: bool = True
    #: Enters each engine call's seed, with global_steps, uid (or index), sample and turn. Simulated engines honour it;
    #: SGLang only with `engine.args.enable_deterministic_inference=true`.
    seed: int = 0
    val_kwargs: ValConfig = ValConfig()
    #: `error` fails the row; `left` drops the prompt's head before the engine sees it, with a warning.
    prompt_overflow: Literal["error", "left"] = "error"
    #: Share of rows that may fail before `generate_sequences` raises RolloutError.
    max_failed_fraction: float = Field(0.0, ge=0, le=1)
    #: Modules imported in every worker, so that their `@register` works there.
    imports: tuple[str, ...] = ()
    #: YAML list of `{name, _target_, …}`.
    agent_loop_config_path: str | None = None
    #: The same on every turn.
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    #: Answers that are broken off for new weights go on afterwards, on those (within the same token limit), and loops
    #: never notice. False: they end there, with `stop_reason` "abort", and their rows are `partial`.
    partial_rollout: bool = True
    #: Wall-clock seconds one trajectory may take.
    trajectory_timeout_s: float = Field(3600.0, gt=0)

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("must be -1 (all) or at least 1")
        return value


class RewardConfig(Section):
    """Scores rows in the workers, each as soon as it ends, unless its loop has scored it."""

    #: Dotted path of ``function(data_source, solution_str, ground_truth, extra_info)`` -> float, or dict with `score`.
    function: str | None = None
    #: More keyword arguments for it.
    kwargs: dict[str, Any] = Field(default_factory=dict)
    #: Seconds per row.
    timeout_s: float = Field(60.0, gt=0)
    #: What becomes of a row that cannot be scored: `fail` fails it; `none` leaves it without a score and says why in
    #: its `reward_extra_info["reward_error"]`.
    on_error: Literal["fail", "none"] = "fail"

    @model_validator(mode="after")
    def _has_function(self) -> RewardConfig:
        if self.kwargs and self.function is None:
            raise ValueError("kwargs are for function, which is not set")
        return self


class TraceConfig(Section):
    """Where a trajectory's events go; nowhere by default."""

    #: Dotted path of a `zagent.Tracer` class, one object per worker; `zagent.worker.trace.JsonlTracer` writes files.
    target: str | None = None
    #: Its constructor's keyword arguments. A relative `path` is the caller's, not the worker's.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Events carry text beside token ids.
    token2text: bool = True

    @model_validator(mode="after")
    def _has_target(self) -> TraceConfig:
        if self.args and self.target is None:
            raise ValueError("args are for target, which is not set")
        return self
