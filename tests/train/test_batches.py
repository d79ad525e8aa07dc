"""Each row exactly once an epoch, for any number of ranks and any batch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.train.batches import epoch_order, micro_batches, update_rows

SIZES = st.integers(1, 40)


@given(rows=SIZES, global_batch=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_row_once_an_epoch(rows, global_batch, seed, epochs):
    per_epoch = -(-rows // global_batch)
    for epoch in range(epochs):
        updates = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = [row for update in updates for row in update_rows(update, rows, global_batch, seed)]
        assert sorted(seen) == list(range(rows))


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    per_device=st.integers(1, 8),
    world=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_ranks_share_an_update_without_repeats_and_in_step(lengths, per_device, world):
    rows = range(len(lengths))
    shares = [micro_batches(rows, lengths, per_device, world, rank) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # collectives need equal counts
    assert all(len(ids) <= per_device for share in shares for ids in share)
    assert Counter(row for share in shares for ids in share for row in ids) == Counter(rows)


def test_five_rows_on_two_ranks_take_three_passes():
    shares = [micro_batches(range(5), [1] * 5, 1, 2, rank) for rank in range(2)]
    assert shares == [[[0], [2], [4]], [[1], [3], []]]


def test_epochs_differ_and_the_seed_decides():
    assert epoch_order(20, 1, 0) == epoch_order(20, 1, 0)
    assert epoch_order(20, 1, 0) != epoch_order(20, 1, 1)
    assert epoch_order(20, 1, 0) != epoch_order(20, 2, 0)
