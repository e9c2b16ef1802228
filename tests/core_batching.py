"""Batches by length: every document once, within the limit, with little padding."""

from hypothesis import given, settings
from hypothesis import strategies as st

from c2kv_core.batching import MAX_PADDING, length_batches


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), max_size=40), max_tokens=st.integers(1, 1000))
def test_batches_keep_to_their_limits(lengths: list[int], max_tokens: int) -> None:
    batches = length_batches(lengths, max_tokens=max_tokens)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        real = sum(lengths[place] for place in batch)
        padded = len(batch) * max(lengths[place] for place in batch)
        assert len(batch) == 1 or padded <= max_tokens
        assert padded - real <= MAX_PADDING * padded + 1e-9


def test_equal_lengths_share_batches() -> None:
    assert length_batches([10] * 5, max_tokens=20) == [[0, 1], [2, 3], [4]]
    assert length_batches([], max_tokens=20) == []
