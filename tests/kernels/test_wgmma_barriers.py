"""Static check of the barrier between a wgmma and the next write of the memory that it reads."""

import pytest

from baton_kernels.wgmma_barriers import unordered_writes

# A loop over tiles by two warpgroups, the fourth line of which is the barrier.
LOOP = """.reqntid 256
$L__BB0_1:
  wgmma.wait_group.sync.aligned 0;
  bar.sync 0;
  @%p1 st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};
  cp.async.cg.shared.global [ %r6 + 0 ], [ %rd1 + 0 ], 0x10;
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r7}, %rd2, %rd3, 1, 1, 1, 0, 0;
  @%p2 bra $L__BB0_1;
  ret;
"""
BARRIER = "  bar.sync 0;"


def test_wgmma_barriers_accept_barrier_on_every_path() -> None:
    assert unordered_writes(LOOP) == []


def test_wgmma_barriers_find_writes_without_barrier() -> None:
    without = LOOP.replace(BARRIER, "")
    assert unordered_writes(without) == [5, 6]
    assert unordered_writes(without, copies_are_read=False) == [5]
    assert unordered_writes(without.replace(".reqntid 256", ".reqntid 128")) == []


@pytest.mark.parametrize("jump", ["@%p3 bra $L__BB0_2;", "bra.uni $L__BB0_2;"])
def test_wgmma_barriers_find_path_around_barrier(jump: str) -> None:
    assert unordered_writes(LOOP.replace(BARRIER, f"  {jump}\n{BARRIER}\n$L__BB0_2:")) == [7, 8]


def test_wgmma_barriers_follow_loop_to_its_head() -> None:
    """The wait at the end of one round, the write at the beginning of the next."""
    lines = LOOP.splitlines()
    rotated = "\n".join([*lines[:2], *lines[4:7], lines[2], *lines[7:]])
    assert unordered_writes(rotated) == [3, 4]
