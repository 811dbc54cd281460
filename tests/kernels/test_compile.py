"""The tool that compiles kernels ahead of time, and what it finds at fault."""

import dataclasses
import importlib

import pytest
import torch
import triton
import triton.language as tl

from baton_kernels import compile as tool
from baton_kernels.attention.variants import VARIANTS
from baton_kernels.dependent_launch import wait_for_kernel_before
from baton_kernels.gpu import GPUS
from baton_kernels.launch import check_fp8
from baton_kernels.variant import Variant
from tests.support.grids import nightly
from tests.support.repository import ROOT


@triton.jit
def _hoarding_kernel(x, out, SIZE: tl.constexpr):  # noqa: N803
    """Keeps more numbers at once than there are registers."""
    places = tl.arange(0, SIZE)
    values = tl.load(x + places)
    sums = tl.cumsum(values, axis=0)
    tl.store(out + places, sums)
    tl.store(out + SIZE + places, values)


HOARDING = Variant(
    name="hoarding",
    kernel=_hoarding_kernel,
    signature={"x": "*fp32", "out": "*fp32"},
    constants={"SIZE": 8192},
    num_warps=1,
    num_stages=1,
)


_HAS_VARIANTS = "VARIANTS: Final"


def linear(dtype: str) -> Variant:
    return next(
        v for v in tool.variants("baton_kernels.rows.linear") if v.name == f"linear {dtype}"
    )


def test_every_kernel_module_is_compiled() -> None:
    files = (ROOT / "kernels/baton_kernels").rglob("*.py")
    found = [
        file.relative_to(ROOT / "kernels") for file in files if _HAS_VARIANTS in file.read_text()
    ]
    assert sorted(tool.MODULES) == sorted(".".join(file.with_suffix("").parts) for file in found)


def test_variant_names_are_unique() -> None:
    names = [variant.name for module in tool.MODULES for variant in tool.variants(module)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", tool.MODULES)
def test_kernel_modules_choose_fp_fusion_explicitly(module: str) -> None:
    assert importlib.import_module(module).FP_FUSION in (True, False)


@pytest.mark.parametrize("capability", [90, *nightly(gpu for gpu in GPUS if gpu != 90)])
def test_compiled_linear_uses_tensor_cores_for_bf16_only(capability: int) -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        compiled = tool.compile_variant(linear(dtype), capability, fp_fusion=True)
        found = tool.has_bf16_mma(compiled.asm["ptx"], compiled.asm["ttgir"])
        assert found == (dtype == "bf16")


def test_compile_check_passes_sound_variant() -> None:
    usage = tool.inspect(linear("bf16"), 90, fp_fusion=True)
    assert usage.faults == ()
    assert 0 < usage.registers <= 255
    assert usage.dynamic_shared > 0


def test_compile_check_finds_register_spills() -> None:
    usage = tool.inspect(HOARDING, 80, fp_fusion=True)
    assert usage.spilled_bytes > 0
    assert f"spills {usage.spilled_bytes} bytes of registers per thread" in usage.faults[0]


SMALL = ("add_rms_norm bf16 4096", "silu_and_multiply bf16", "clamped_swiglu bf16")
OF_CACHE = ("rotate_and_write bf16 to bf16 128 of 128", "write_kv bf16 to bf16 128")
OF_ATTENTION = ("decode attention bf16 128 x 4", "merge of attention bf16 128")


@pytest.mark.parametrize("name", [*SMALL, *OF_CACHE, *OF_ATTENTION])
def test_small_kernels_wait_for_the_kernel_before_them(name: str) -> None:
    (variant,) = (
        variant
        for module in tool.MODULES
        for variant in tool.variants(module)
        if variant.name == name
    )
    compiled, old = (tool.compile_variant(variant, target, fp_fusion=False) for target in (90, 80))
    assert compiled.metadata.launch_pdl
    assert tool.waits_first(compiled.asm["ptx"])
    assert not old.metadata.launch_pdl
    assert "griddepcontrol" not in old.asm["ptx"]


@triton.jit
def _hasty_kernel(x, out, IS_DEPENDENT: tl.constexpr):  # noqa: N803
    value = tl.load(x)
    wait_for_kernel_before(IS_DEPENDENT)
    tl.store(out, value)


def test_compile_check_finds_access_before_wait() -> None:
    changes = {"name": "hasty", "kernel": _hasty_kernel, "constants": {}}
    usage = tool.inspect(dataclasses.replace(HOARDING, **changes), 90, fp_fusion=True)
    assert "accesses memory before it has waited" in usage.faults[0]


def test_compile_check_finds_too_much_shared_memory() -> None:
    tiles = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 256, "BLOCK_K": 128, "IS_PARTIAL": True}
    large = dataclasses.replace(
        linear("bf16"), constants=linear("bf16").constants | tiles, num_stages=4
    )
    usage = tool.inspect(large, 90, fp_fusion=True)
    assert any("of shared memory" in fault and "than sm_90 has" in fault for fault in usage.faults)


def test_compile_check_finds_missing_matrix_instructions() -> None:
    pretender = dataclasses.replace(linear("fp16"), needs_mma="bf16")
    usage = tool.inspect(pretender, 80, fp_fusion=True)
    assert usage.faults == (
        "has no bf16 matrix instruction in its PTX, so it does not use tensor cores",
    )


def test_compile_check_finds_missing_tma_instructions() -> None:
    pretender = dataclasses.replace(linear("bf16"), needs_tma=True)
    usage = tool.inspect(pretender, 90, fp_fusion=True)
    assert usage.faults == (
        "has no cp.async.bulk.tensor in its PTX, so it does not copy tiles by TMA",
    )


@pytest.mark.parametrize("name", ["bf16 128 x 4", "ruled bf16 over fp8e4nv 80 x 4"])
def test_compiled_prefill_by_descriptors_copies_by_tma(name: str) -> None:
    (variant,) = (
        v for v in VARIANTS if v.name == f"prefill attention by TMA {name}" and 90 in v.targets
    )
    assert variant.needs_tma
    assert tool.inspect(variant, 90, fp_fusion=False).faults == ()


def test_every_prefill_but_float32_is_compiled_by_descriptors() -> None:
    prefills = [v for v in VARIANTS if v.name.startswith("prefill") and "fp32" not in v.name]
    pairs = {
        by_tma: {
            (v.name.replace("by TMA ", ""), n) for v in prefills for n in v.targets
            if v.needs_tma == by_tma and GPUS[n].has_tma
        }
        for by_tma in (False, True)
    }  # fmt: skip
    assert pairs[True] == pairs[False] != set()
    assert all(GPUS[n].has_tma for v in VARIANTS if v.needs_tma for n in v.targets)


@pytest.mark.parametrize("module", tool.MODULES)
def test_compile_targets_every_gpu_with_each_kernel(module: str) -> None:
    targets: dict[object, set[int]] = {}
    for variant in tool.variants(module):
        targets.setdefault(variant.kernel, set()).update(variant.targets)
    assert targets
    assert all(found == set(GPUS) for found in targets.values())


@pytest.mark.parametrize("capability", [86, 120])
def test_prefill_of_256_fits_gpus_with_less_shared_memory(capability: int) -> None:
    (variant,) = (
        v
        for v in tool.variants("baton_kernels.attention.variants")
        if v.name.startswith("prefill attention bf16 256 x 4") and capability in v.targets
    )
    usage = tool.inspect(variant, capability, fp_fusion=False)
    assert usage.faults == ()
    assert 0 < usage.dynamic_shared <= 99 * 1024


def test_check_fp8_refuses_gpu_below_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        dtype, is_cuda, device = torch.float8_e4m3fn, True, torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"this GPU has 8\.6: choose bfloat16 or float16"):
        check_fp8(OnGpu())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8(OnGpu())  # type: ignore[arg-type]
