"""Compiled code of the deterministic mode: the same arithmetic in prefill and decode."""

import re

import pytest

from baton_kernels.attention_variants import VARIANTS
from baton_kernels.compile import compile_variant
from baton_kernels.gpu import GPUS
from baton_kernels.variant import Variant

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


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    "head_dim",
    [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)],
)
def test_deterministic_kernels_compile_to_same_arithmetic(head_dim: int, capability: int) -> None:
    decode, prefill = (
        operations(deterministic(p, head_dim), capability) for p in ("decode", "prefill")
    )
    assert decode == prefill
    # Two products, which may be of one shape, and reductions of one.
    assert len(decode) in (2, 3), decode
