"""AMX tiles in attention of bfloat16 prompts, emulated in C."""

import ctypes
import math
import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from baton.engine.executor.attention.in_place_attention import InPlaceAttention
from baton.engine.executor.attention.interface import LayerAttention
from baton.engine.executor.attention.mask_rule import MaskRule
from baton_kernels.cpu import library
from baton_kernels.cpu.paged_attention import prompt_arithmetic
from tests.support.engine.in_place_attention import check_any_batch
from tests.support.engine.paged_attention import SCALE, Broken, Heads, check, schedules
from tests.support.repository import ROOT

EMULATED = ROOT / "tests/support/kernels/emulated_tiles.h"
HEADS = Heads(num_kv_heads=2, per_kv=3, key_dim=64, value_dim=32)
PLAIN = LayerAttention(SCALE, MaskRule())

pytestmark = pytest.mark.system  # a C compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def tiles(folder, monkeypatch):
    """The kernels with emulated tiles, in place of this CPU's."""
    found = _built(folder)
    monkeypatch.setattr("baton_kernels.cpu.paged_attention.load", lambda _: found)
    return found


@given(
    schedules(),
    st.builds(
        Heads,
        st.integers(1, 3),
        st.integers(1, 8),
        st.sampled_from([32, 64, 96]),
        st.sampled_from([16, 48, 64]),
    ),
    st.integers(1, 16),
    st.none() | st.integers(1, 20),
    st.integers(0, 2**32 - 1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_attention_by_tiles_equals_the_reference(tiles, steps, heads, block_size, window, seed):
    layer = LayerAttention(1 / math.sqrt(heads.key_dim), MaskRule(window))
    how = {"block_size": block_size, "dtype": torch.bfloat16, "seed": seed}
    check(InPlaceAttention, heads, layer, steps, **how)


@pytest.mark.parametrize("window", [None, 100])
def test_attention_by_tiles_crosses_tiles_of_keys(tiles, window):
    before = _num_products(tiles)
    steps = [[(0, 300), (1, 131)], [(0, 1), (1, 90)], [(0, 33), (1, 1)]]
    layer = LayerAttention(SCALE, MaskRule(window))
    check(InPlaceAttention, HEADS, layer, steps, block_size=16, dtype=torch.bfloat16)
    assert _num_products(tiles) > before
    assert prompt_arithmetic(torch.bfloat16) == "AMX tiles"


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_by_tiles_keeps_broken_keys_apart(tiles, window, part):
    before = _num_products(tiles)
    steps = [[(0, 300), (1, 131)], [(0, 1), (1, 90)], [(0, 33), (1, 1)]]
    broken = {0: Broken(170, part, math.nan), 1: Broken(150, part, math.inf)}
    layer = LayerAttention(SCALE, MaskRule(window))
    how = {"block_size": 16, "dtype": torch.bfloat16, "broken": broken}
    check(InPlaceAttention, HEADS, layer, steps, **how)
    assert _num_products(tiles) > before


@pytest.mark.parametrize("window", [None, 90])
def test_attention_by_tiles_is_bitwise_equal_in_any_batch(tiles, window):
    before = _num_products(tiles)
    check_any_batch(torch.bfloat16, window)
    assert _num_products(tiles) > before


def test_other_widths_are_computed_without_tiles(tiles):
    before = _num_products(tiles)
    heads = replace(HEADS, key_dim=40)
    check(InPlaceAttention, heads, PLAIN, [[(0, 100)]], dtype=torch.bfloat16)
    assert _num_products(tiles) == before


def test_wrong_products_are_noticed_before_they_are_used(folder, monkeypatch):
    wrong = _built(folder, "-DWRONG_TILES")
    monkeypatch.setattr("baton_kernels.cpu.paged_attention.load", lambda _: wrong)
    tried = _num_products(wrong)
    assert tried > 0
    check(InPlaceAttention, HEADS, PLAIN, [[(0, 100)]], dtype=torch.bfloat16)
    assert _num_products(wrong) == tried
    assert prompt_arithmetic(torch.bfloat16) == "bfloat16 pairs"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler is for other CPUs")
def test_kernels_are_compiled_for_cpus_with_tiles():
    sources = Path(library.__file__).parent
    command = ["gcc", "-std=gnu11", "-O3", "-march=sapphirerapids", "-fopenmp", "-S", "-o", "-"]
    done = subprocess.run(
        [*command, sources / "paged_attention.c"], capture_output=True, text=True, check=True
    )
    assert "tdpbf16ps" in done.stdout


def _built(folder: Path, *flags: str) -> ctypes.CDLL:
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    flags = (*library.KERNELS.flags, "-D__AMX_BF16__", "-include", str(EMULATED), *flags)
    kernels = replace(library.KERNELS, sources=("paged_attention.c",), flags=flags)
    return ctypes.CDLL(str(library.build(kernels, folder)))


def _num_products(tiles: ctypes.CDLL) -> int:
    return ctypes.c_int64.in_dll(tiles, "num_tile_products").value
