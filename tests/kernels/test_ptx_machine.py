"""Machine that executes PTX: results of small kernels, and each fault that it has to report."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ptx import library
from tests.support.ptx.emulator import Checks, EmulatorError
from tests.support.ptx.programs import run
from tests.support.ptx.tensor_map import TensorMap

pytestmark = pytest.mark.system  # a C++ compiler


def test_machine_names_the_missing_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(library.NoMachineError, match=r"no C\+\+ compiler.*install g\+\+"):
        library.build(tmp_path)


# Each lane of each warp has its own 4 bytes of each tensor.
_OWN = """
  mad.wide.u32 %rd10, %r0, 4, %rd0;
  mad.wide.u32 %rd11, %r0, 4, %rd1;
"""
_LANES = torch.arange(32, dtype=torch.int32)


def unary(instructions: str, values: torch.Tensor) -> torch.Tensor:
    """From %r2 to %r3, in each lane."""
    out = torch.zeros_like(values)
    body = f"{_OWN} ld.global.b32 %r2, [%rd10]; {instructions} st.global.b32 [%rd11], %r3;"
    run(body, values, out)
    return out


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("add.s32 %r3, %r2, -7;", lambda x: x - 7),
        ("mul.hi.s32 %r3, %r2, 123456789;", lambda x: (x.astype(np.int64) * 123456789) >> 32),
        ("div.s32 %r3, %r2, 3;", lambda x: np.trunc(x / 3)),
        ("rem.s32 %r3, %r2, 3;", lambda x: np.fmod(x, 3)),
        ("shr.s32 %r3, %r2, 2;", lambda x: x >> 2),
        ("shl.b32 %r3, %r2, 31;", lambda x: x << 31),
        ("max.relu.s32 %r3, %r2, 5;", lambda x: np.maximum(x, 5)),
        ("bfe.s32 %r3, %r2, 1, 3;", lambda x: ((x >> 1 & 7) ^ 4) - 4),
        ("setp.lt.and.s32 %p1|%p2, %r2, 5, 1; selp.b32 %r3, 9, %r2, %p1;",
         lambda x: np.where(x < 5, 9, x)),
        ("shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;", lambda x: np.roll(x, 16)),
        ("prmt.b32 %r3, %r2, 0, 0x0123;", lambda x: x.byteswap()),
        ("lop3.b32 %r3, %r2, 12, 10, 0x96;", lambda x: x ^ 12 ^ 10),
    ],
)  # fmt: skip
def test_machine_computes_integers_as_numpy(instructions: str, expected: object) -> None:
    values = torch.arange(32, dtype=torch.int32) * 991 - 7000
    out = unary(instructions, values)
    assert out.tolist() == expected(values.numpy()).astype(np.int32).tolist()


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("fma.rn.f32 %r3, %r2, 0f40400000, 0f3F800000;", lambda x: x * 3 + 1),
        ("ex2.approx.ftz.f32 %r3, %r2;", torch.exp2),
        ("cvt.rn.bf16x2.f32 %r4, %r2, 0f00000000; and.b32 %r3, %r4, 0xffff0000;",
         lambda x: x.bfloat16().float()),
        ("cvt.rn.f16.f32 %h1, %r2; cvt.f32.f16 %r3, %h1;", lambda x: x.half().float()),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, 0f00000000, %r2; cvt.rn.f16x2.e4m3x2 %r4, %h1; "
         "mov.b32 {%h2, %h3}, %r4; cvt.f32.f16 %r3, %h2;",
         lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
        ("cvt.rni.f32.f32 %r3, %r2;", torch.round),
    ],
)  # fmt: skip
def test_machine_computes_floats_as_torch(instructions: str, expected: object) -> None:
    values = torch.randn(32) * torch.logspace(-6, 3, 32)
    out = unary(instructions, values.view(torch.int32)).view(torch.float32)
    torch.testing.assert_close(out, expected(values), rtol=1e-6, atol=0.0)


def test_machine_reunites_lanes_after_branches_and_loops() -> None:
    """Lane i loops i times; odd lanes add 100. The shuffle after it needs all of them."""
    out = unary(
        """
        mov.b32 %r3, 0;
        again: setp.ge.s32 %p1, %r3, %r2;
        @%p1 bra over;
        add.s32 %r3, %r3, 1;
        bra.uni again;
        over: and.b32 %r4, %r2, 1;
        setp.eq.s32 %p2, %r4, 0;
        @%p2 bra even;
        add.s32 %r3, %r3, 100;
        even: shfl.sync.idx.b32 %r4, %r3, 31, 31, -1;
        add.s32 %r3, %r3, %r4;
        """,
        _LANES,
    )
    assert out.tolist() == [i + 100 * (i % 2) + 131 for i in range(32)]


def test_machine_adds_atomically_across_programs() -> None:
    total = torch.zeros(1, dtype=torch.int32)
    run("red.global.add.u32 [%rd0], 1;", total, num_programs=5)
    assert total.item() == 5 * 32


def test_machine_multiplies_matrices_of_one_warp() -> None:
    """mma.sync of 16 by 16 and 16 by 8, with fragments as PTX's manual lays them out."""
    left, right = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    lane = np.arange(32)
    rows, pairs = lane // 4, lane % 4
    as_pairs = left.view(torch.int32)  # [16, 8]
    a = torch.stack([as_pairs[rows + 8 * (i % 2), pairs + 4 * (i // 2)] for i in range(4)], 1)
    columns = right.T.contiguous().view(torch.int32)  # [8, 8]
    b = torch.stack([columns[rows, pairs + 4 * i] for i in range(2)], 1)
    given, out = torch.cat([a, b], 1).contiguous(), torch.zeros(32, 4)
    run(
        """
        mad.wide.u32 %rd10, %r0, 24, %rd0;
        mad.wide.u32 %rd11, %r0, 16, %rd1;
        ld.global.v2.b32 {%r10, %r11}, [%rd10];
        ld.global.v2.b32 {%r12, %r13}, [%rd10+8];
        ld.global.v2.b32 {%r14, %r15}, [%rd10+16];
        mov.b32 %r20, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r2, %r3, %r4, %r5},
          {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r20, %r20, %r20};
        st.global.v4.b32 [%rd11], {%r2, %r3, %r4, %r5};
        """,
        given,
        out,
    )
    expected = (left.double() @ right.double()).float()
    for i in range(4):
        found = out[:, i]
        torch.testing.assert_close(found, expected[rows + 8 * (i // 2), 2 * pairs + i % 2])


# Of 4 warps: A [64, 16] and B [8, 16] in core matrices of 8 rows of 16 bytes, then their product.
# Lines that begin with @@ are taken away in turn.
WGMMA = """
  shl.b32 %r2, %r0, 4;
  mov.b32 %r3, global_smem;
  add.s32 %r4, %r3, %r2;
  cvt.u64.u32 %rd10, %r2;
  add.s64 %rd11, %rd0, %rd10;
  ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd11];
  st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13};
  setp.lt.u32 %p1, %r0, 16;
  @%p1 ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd11+2048];
  @%p1 st.shared.v4.b32 [%r4+2048], {%r10, %r11, %r12, %r13};
  FENCE fence.proxy.async.shared::cta;
  BARRIER bar.sync 0;
  mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
  shr.u32 %r5, %r3, 4;
  cvt.u64.u32 %rd12, %r5;
  or.b64 %rd13, %rd12, 0x0000001000080000;
  add.s64 %rd14, %rd13, 128;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %rd13, %rd14,
    0, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  WAIT wgmma.wait_group.sync.aligned 0;
  SECOND bar.sync 0;
  @%p1 st.shared.b32 [%r4+2048], %r20;
  mad.wide.u32 %rd15, %r0, 16, %rd1;
  st.global.v4.b32 [%rd15], {%r20, %r21, %r22, %r23};
  LAST wgmma.wait_group.sync.aligned 0;
"""
MARKS = ("FENCE", "BARRIER", "WAIT", "SECOND", "LAST")


def in_core_matrices(rows: torch.Tensor) -> torch.Tensor:
    """[n, 16] as 8 rows of 16 bytes, first those of the first half of the columns."""
    return rows.view(-1, 8, 2, 8).transpose(1, 2).contiguous()


def run_wgmma(without: str | None, checks: Checks) -> None:
    left, right = torch.randn(64, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    given = torch.cat([in_core_matrices(x).flatten() for x in (left, right)])
    out = torch.zeros(128, 4)
    body = WGMMA
    for mark in MARKS:
        body = body.replace(f"{mark} ", "// " if mark == without else "")
    run(body, given, out, num_warps=4, shared_bytes=2304, checks=checks)
    product = out.view(4, 8, 4, 2, 2)  # warp, row, pair, upper or lower half, neighbour
    expected = (left.double() @ right.double().T).float().view(4, 2, 8, 4, 2)
    torch.testing.assert_close(product, expected.permute(0, 2, 3, 1, 4))


@pytest.mark.parametrize("seed", [1, 2])
def test_machine_multiplies_matrices_of_warpgroup(seed: int) -> None:
    run_wgmma(None, Checks(seed=seed))


@pytest.mark.parametrize(
    ("without", "report"),
    [
        ("FENCE", "without a proxy fence between"),
        ("BARRIER", r"race: read of shared byte \d+, written by warp \d|which was not written"),
        ("WAIT", "which an unfinished wgmma reads"),
        ("SECOND", "which an unfinished wgmma reads|race: write of shared byte .* read by warp"),
    ],
)
def test_machine_reports_wgmma_without(without: str, report: str) -> None:
    with pytest.raises(EmulatorError, match=report):
        run_wgmma(without, Checks(seed=3))


# One warp writes a word and the other one reads it.
EXCHANGE = """
  mov.b32 %r2, global_smem;
  shl.b32 %r3, %r0, 2;
  add.s32 %r4, %r2, %r3;
  xor.b32 %r5, %r3, 128;
  add.s32 %r6, %r2, %r5;
  st.shared.b32 [%r4], %r0;
  bar.sync 0;
  ld.shared.b32 %r7, [%r6];
  mad.wide.u32 %rd10, %r0, 4, %rd0;
  st.global.b32 [%rd10], %r7;
"""


@pytest.mark.parametrize("seed", range(4))
def test_machine_orders_warps_by_barriers_alone(seed: int) -> None:
    out, checks = torch.zeros(64, dtype=torch.int32), Checks(seed=seed)
    run(EXCHANGE, out, num_warps=2, shared_bytes=256, checks=checks)
    assert out.tolist() == [i ^ 32 for i in range(64)]
    with pytest.raises(EmulatorError, match=r"written by warp \d|which was not written"):
        run(EXCHANGE.replace("bar.sync 0;", ""), out, num_warps=2, shared_bytes=256, checks=checks)


COPY = """
  mov.b32 %r2, global_smem;
  shl.b32 %r3, %r0, 4;
  add.s32 %r4, %r2, %r3;
  mad.wide.u32 %rd10, %r0, 16, %rd0;
  cp.async.cg.shared.global [%r4], [%rd10], 16, 16;
  cp.async.commit_group;
  cp.async.wait_group 0;
  ld.shared.b32 %r5, [%r4];
  mad.wide.u32 %rd11, %r0, 4, %rd1;
  st.global.b32 [%rd11], %r5;
"""


def test_machine_reports_copy_without_wait() -> None:
    source, out = torch.arange(128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run(COPY, source, out, shared_bytes=512)
    assert out.tolist() == list(range(0, 128, 4))
    for late in ("cp.async.wait_group 1;", ""):
        with pytest.raises(EmulatorError, match="before the asynchronous copy to it was waited"):
            run(COPY.replace("cp.async.wait_group 0;", late), source, out, shared_bytes=512)


# Thread 0 copies a box by TMA, all wait for its mbarrier at byte 1024. Argument 1 is the map.
TENSOR_COPY = """
  mov.b32 %r2, global_smem;
  add.s32 %r3, %r2, 1024;
  setp.eq.u32 %p1, %r0, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
  bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
    [%r2], [%rd1, {0, 3}], [%r3];
  {
  .reg .pred complete;
  again:
  mbarrier.try_wait.parity.shared::cta.b64 complete, [%r3], 0;
  @!complete bra.uni again;
  }
  mad.wide.u32 %rd11, %r0, 4, %rd0;
  shl.b32 %r4, %r0, 2;
  add.s32 %r5, %r2, %r4;
  ld.shared.b32 %r6, [%r5];
  st.global.b32 [%rd11], %r6;
"""


@pytest.mark.parametrize("checks", [Checks(seed=2), Checks(copies_are_late=True)], ids=str)
def test_machine_reports_tensor_copy_without_wait(checks: Checks) -> None:
    """Rows 3 to 6 of a tensor of 5 rows: what is outside is zero."""
    source = torch.arange(5 * 32, dtype=torch.int32).view(5, 32)
    out = torch.full((64,), -1, dtype=torch.int32)
    tensor_map = bytes(TensorMap(source.data_ptr(), 4, 0, (32, 5), (128,), (16, 4)))
    held = torch.frombuffer(bytearray(tensor_map), dtype=torch.uint8)
    arguments = [("i64", out.data_ptr()), ("i64", held.data_ptr())]
    given = {"num_warps": 2, "shared_bytes": 1032, "arguments": arguments, "checks": checks}
    run(TENSOR_COPY, out, source, **given)
    box = [*source[3, :16].tolist(), *source[4, :16].tolist(), *[0] * 32]
    assert out.tolist() == box
    report = r"before the asynchronous copy|written by a tensor copy"
    with pytest.raises(EmulatorError, match=report):
        run(TENSOR_COPY.replace("@!complete bra.uni again;", ""), out, source, **given)


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("ld.global.b32 %r2, [%rd0+128];", "out of bounds of global memory, to 4 bytes, byte 128"),
        ("ld.global.b32 %r2, [%rd0+2];", "global access of 4 bytes is not aligned"),
        ("ld.shared.b32 %r2, [global_smem+64];", "of bounds of shared memory, to 4 bytes at 64"),
        ("ld.shared.b32 %r2, [global_smem+60];", "read of shared byte 60, which was not written"),
        ("st.global.b32 [%rd0], %r1;", "race between programs on a global byte"),
        ("ld.global.b32 %r2, [%rd0+4]; setp.eq.s32 %p1, %r1, 0; @%p1 st.global.b32 [%rd0+4], 1;",
         "race"),
        ("again: bra again;", "does not end after"),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1;", "deadlock: .* waits at barrier 1"),
        ("setp.lt.u32 %p1, %r0, 3; @%p1 elect.sync %r2|%p2, -1;", "not all lanes"),
        ("vsub4.s32.s32.s32 %r2, %r3, %r4, %r5;", r"line \d+ has vsub4.*does not know this instr"),
    ],
)  # fmt: skip
def test_machine_reports_fault(body: str, report: str) -> None:
    shared = {"num_warps": 2, "num_programs": 2, "shared_bytes": 64}
    with pytest.raises(EmulatorError, match=report):
        run(body, _LANES.clone(), checks=Checks(most_instructions=10_000), **shared)


def test_machine_reports_dependent_launch_without_wait() -> None:
    """It may read what the launch before reads, as weights are read before the wait."""
    tensor, report = _LANES.clone(), r"without griddepcontrol\.wait"
    load, store = "ld.global.b32 %r2, [%rd0];", "st.global.b32 [%rd0], 1;"
    run(load, tensor, is_dependent=True, read_before=[tensor])
    run("griddepcontrol.wait; " + load, tensor, is_dependent=True, written_before=[tensor])
    run(load, tensor, written_before=[tensor])
    with pytest.raises(EmulatorError, match=report):
        run(load, tensor, is_dependent=True, written_before=[tensor])
    with pytest.raises(EmulatorError, match=report):
        run(store, tensor, is_dependent=True, read_before=[tensor])
