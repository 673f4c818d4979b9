"""`actor_rollout_ref.rollout.agent.agent_loop_manager_class=zagent.adapters.verl.AgentLoopManager`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from verl.utils.ray_utils import auto_await

from zagent.adapters.verl.batches import from_verl, to_verl, with_scores
from zagent.adapters.verl.config import check_agreed, config_of, endpoint_of
from zagent.data_proto import DataProto
from zagent.errors import ConfigError
from zagent.trainer import manager as zagent_manager


class AgentLoopManager:
    """verl's manager of agent loops, on zagent's workers and engines.

    Launches a cluster by the trainer's configuration (`config.config_of`), or joins the one at `zagent.endpoint`.
    Methods that verl awaits or calls may be awaited or called. ``manager`` is zagent's own.

    Args:
        config: the whole configuration of the trainer.
        llm_client: of verl's own servers; not used.
        teacher_client: distillation, which zagent has not.
        reward_loop_worker_handles: verl's reward loop; scores the rows that the loops have not scored.
    """

    def __init__(
        self,
        config: DictConfig,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
        **_: Any,
    ) -> None:
        if teacher_client is not None:
            raise ConfigError("zagent computes no teacher's log-probabilities: distillation is verl's own manager's")
        self.config = config
        self._scorers = list(reward_loop_worker_handles or ())
        ours = config_of(config)
        endpoint = endpoint_of(config)
        if endpoint is None:
            self.manager = zagent_manager.AgentLoopManager.launch(ours)
            return
        self.manager = zagent_manager.AgentLoopManager.connect(endpoint)
        try:
            check_agreed(ours.rollout, self.manager.config.rollout)
        except ConfigError:
            self.manager.close()
            raise

    @classmethod
    @auto_await  # type: ignore[untyped-decorator]
    async def create(cls, *args: Any, **kwargs: Any) -> AgentLoopManager:
        """The constructor, off the event loop. Raises as `zagent.AgentLoopManager.launch` and `connect`."""
        return await asyncio.to_thread(cls, *args, **kwargs)

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> Any:
        """verl's `DataProto` for verl's `DataProto`, rows in input order. Raises as `zagent.AgentLoopManager`."""
        batch = from_verl(prompts)
        out = await self.manager.generate_sequences_async(batch)
        if self._scorers and "rm_scores" not in out.batch:
            out = with_scores(out, await self._score(out))
        return to_verl(out)

    async def _score(self, out: DataProto) -> list[dict[str, Any]]:
        """By verl's reward loop, each row on one of its workers; they may change what they are given."""
        rows = [to_verl(copy.deepcopy(out[i : i + 1])) for i in range(len(out))]
        calls = [self._scorers[i % len(self._scorers)].compute_score.remote(row) for i, row in enumerate(rows)]
        return list(await asyncio.gather(*calls))

    def clear_kv_cache(self) -> None:
        """Every engine forgets its prefix cache."""
        self.manager.clear_kv_cache()

    def sleep(self, level: int | None = None) -> Any:
        """Engines give memory back, see `zagent.AgentLoopManager.sleep`."""
        return self.manager.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """And take it again."""
        self.manager.wake_up(tags)

    def update_weights(self, source: Any, global_steps: int | None = None) -> Any:
        """New weights for zagent's engines (verl's checkpoint engine reaches verl's own servers only), see
        `zagent.AgentLoopManager.update_weights`; the version is the trainer's step."""
        return self.manager.update_weights(source, version=global_steps)

    def abort_all_requests(self) -> None:
        """Running calls give back what they have, and go on after `resume_generation`."""
        self.manager.abort_all_requests()

    def resume_generation(self) -> None:
        """Calls run again."""
        self.manager.resume_generation()

    def close(self) -> None:
        """End what was launched, or just leave."""
        self.manager.close()
