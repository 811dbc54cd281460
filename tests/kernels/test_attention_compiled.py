"""Compiled code of attention: the same arithmetic in prefill and decode of the deterministic mode,
and in prefill by pointers and by descriptors."""

import re

import pytest

from baton_kernels.attention.variants import VARIANTS
from baton_kernels.compile import compile_variant
from baton_kernels.gpu import GPUS
from baton_kernels.variant import Variant
from tests.support.grids import nightly

_ALIAS = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
# Matrix products of any GPU, and the end of a reduction; behind the colon stand types and layouts.
_OPERATION = re.compile(
    r"(?:warp_group_dot |tc_gen5_mma |tt\.dot |^\s*\}\)).* : (.*?)(?: loc\(.*)?$"
)


def deterministic(purpose: str, head_dim: int) -> Variant:
    name = f"{purpose} attention deterministic ruled bf16 {head_dim} x 4"
    return next(variant for variant in VARIANTS if variant.name == name)


def operations(variant: Variant, capability: int) -> set[str]:
    """Shapes and layouts of all matrix products and reductions."""
    code = compile_variant(variant, capability, fp_fusion=False).asm["ttgir"]
    meaning = dict(_ALIAS.findall(code))
    found = [match[1] for line in code.splitlines() if (match := _OPERATION.search(line))]
    return {re.sub(r"#\w+", lambda alias: meaning.get(alias[0], alias[0]), line) for line in found}


@pytest.mark.parametrize("capability", [90, *nightly(gpu for gpu in GPUS if gpu != 90)])
@pytest.mark.parametrize("head_dim", [128, *nightly([64, 256])])
def test_deterministic_kernels_compile_to_same_arithmetic(head_dim: int, capability: int) -> None:
    decode, prefill = (
        operations(deterministic(p, head_dim), capability) for p in ("decode", "prefill")
    )
    assert decode == prefill
    # Two products, which may be of one shape, and reductions of one.
    assert len(decode) in (2, 3), decode


@pytest.mark.parametrize("capability", [90, *nightly([100])])
@pytest.mark.parametrize(
    "name",
    [
        "bf16 128 x 4",
        "deterministic ruled bf16 128 x 4",
        *nightly(
            [
                "bf16 64 x 4",
                "bf16 256 x 4",
                "ruled bf16 over fp8e4nv 80 x 4",
                "deterministic bf16 over fp8e4nv 128 x 4",
            ]
        ),
    ],
)
def test_prefill_by_descriptors_compiles_to_same_arithmetic(name: str, capability: int) -> None:
    by_pointers, by_descriptors = (
        operations(
            next(v for v in VARIANTS if v.name == f"prefill attention {by}{name}"), capability
        )
        for by in ("", "by TMA ")
    )
    assert by_pointers == by_descriptors
    assert len(by_pointers) in (2, 3), by_pointers
