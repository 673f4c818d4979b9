"""The torch process group over which a trainer sends its weights: rank 0 is this process, the others are the engines'
(SGLang's distributed update)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any


class TrainerGroup:
    """Rank 0 of one group. Its methods block, and are called one at a time.

    Args:
        engines: processes of all engines together.
        address: by which they find this host.
        backend: `nccl`, or `gloo` where there is no GPU.
    """

    def __init__(self, name: str, engines: int, *, address: str, backend: str, timeout_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.name, self.backend, self.address, self.world_size = name, backend, address, engines + 1
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(
            address, 0, self.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._group: Any = None

    def join(self) -> None:
        """Wait for the engines. Raises what torch raises after the time."""
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        # As SGLang does it: a group beside the default one, which the trainer may or may not have.
        self._group, _ = _new_process_group_helper(
            *(self.world_size, 0, [], Backend(self.backend), PrefixStore(self.name, self._store)),
            group_name=self.name,  # type: ignore[arg-type]
            timeout=self._timeout,
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.world_size)}

    def send(self, tensors: Mapping[str, Any]) -> None:
        """Broadcast them one after the other; returns when all are out."""
        import torch
        from torch.distributed import broadcast

        device = "cuda" if self.backend == "nccl" else "cpu"
        with torch.no_grad():
            for tensor in tensors.values():
                broadcast(tensor.detach().to(device).contiguous(), src=0, group=self._group)

    def close(self) -> None:
        """This side of it."""
        from torch.distributed import destroy_process_group

        if self._group is not None:
            destroy_process_group(self._group)
            self._group = None
