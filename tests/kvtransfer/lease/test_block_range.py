from hypothesis import given
from hypothesis import strategies as st

from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton_kvtransfer.lease.block_range import BlockRange

sizes = st.integers(1, 9)
windows = st.none() | st.integers(1, 40)


@given(num_tokens=st.integers(1, 60), block_size=sizes, window=windows, num_held=st.integers(0, 70))
def test_block_range_due_is_exactly_blocks_last_token_sees(
    num_tokens, block_size, window, num_held
):
    blocks = BlockRange(num_tokens, block_size)
    first_seen = 0 if window is None else max(0, num_tokens - window)
    seen = {token // block_size for token in range(first_seen, num_tokens)}
    assert set(blocks.due(window, num_held)) == {b for b in seen if b >= num_held}


@given(num_tokens=st.integers(1, 60), block_size=sizes, window=windows)
def test_block_range_due_starts_at_first_block_of_engine(num_tokens, block_size, window):
    group = CacheGroup(BlockPool(1), window)
    due = BlockRange(num_tokens, block_size).due(window, 0)
    assert due.start == group.first_block(num_tokens - 1, block_size)
    assert due.start >= group.first_block(num_tokens - 2, block_size)
