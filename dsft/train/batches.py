"""Which rows an update trains on, and which of them a rank takes in each forward pass. Pure arithmetic.

Everything is a function of the seed and the number of the update, so there is no sampler state: a run goes on at
update n by asking for update n. All ranks compute the same answer, without talking to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch in training order: each exactly once."""
    generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
    return torch.randperm(rows, generator=generator).tolist()


def update_rows(update: int, rows: int, global_batch: int, seed: int) -> list[int]:
    """The rows of update `update` (from 0). The last update of an epoch takes what is left; epochs never mix."""
    epoch, position = divmod(update, -(-rows // global_batch))
    return epoch_order(rows, seed, epoch)[position * global_batch : (position + 1) * global_batch]


def micro_batches(
    rows: Sequence[int], lengths: Sequence[int], per_device: int, world_size: int, rank: int
) -> list[list[int]]:
    """This rank's part of `rows`, cut into forward passes of up to `per_device` rows.

    Every rank gets the same number of passes, as collectives need; a pass may be empty on some ranks. Rows of like
    length go together: that saves padding and keeps ranks in step, and it does not touch the result, since all of
    these rows belong to one update.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    chunks = [ordered[start : start + per_device] for start in range(0, len(ordered), per_device)]
    chunks += [[]] * (-len(chunks) % world_size)
    return chunks[rank::world_size]
