"""Kernels with one wait or barrier less: the emulator notices it, in each family of kernels."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from baton_kernels.attention.tiling import choose_tiling
from baton_kernels.rows.experts import expert_linear, reference_expert_linear, route
from baton_kernels.rows.linear import linear, reference_linear
from tests.support.kernels.attention_cases import attend, by_descriptors, make_case, prefill, share
from tests.support.kernels.comparison import assert_close, random
from tests.support.kernels.interpreter import IS_EMULATED

if not IS_EMULATED:
    pytest.skip("the interpreter has no barriers", allow_module_level=True)

from tests.support.ptx.emulator import Emulator, EmulatorError, Program
from tests.support.ptx.mutations import Site, sites, trapped, without
from tests.support.ptx.plugin import MACHINE

BF16 = torch.bfloat16
Run = Callable[[], None]


def decodes() -> Run:
    case = make_case([300, 5, 131], [1, 1, 1], BF16, head_dim=128, group=4, num_kv_heads=2)
    tiling = choose_tiling(128, BF16, BF16, 2)
    return lambda: case.check(attend(case, tiling))


def shared_prefix() -> Run:
    case = make_case([530, 540, 600], [1, 1, 1], BF16, head_dim=128, group=4, num_kv_heads=1)
    tiling = choose_tiling(128, BF16, BF16, 1)
    prefix = share(case, [0, 1, 2], 512)
    return lambda: case.check(attend(case, tiling, [prefix]))


def prompts(by_tma: bool, head_dim: int = 128) -> Run:
    block_size = 128 if by_tma else 16
    case = make_case([330], [70], BF16, head_dim, 2, 1, block_size)
    tiling = choose_tiling(head_dim, BF16, BF16, 1).prefill
    case = by_descriptors(case, tiling) if by_tma else case
    return lambda: case.check(prefill(case, tiling))


def products() -> Run:
    x, weight = random(5, 512, dtype=BF16), random(130, 512, dtype=BF16)
    expected = reference_linear(x.double(), weight.double())
    return lambda: assert_close(linear(x, weight), expected)


def experts() -> Run:
    x, weight = random(40, 300, dtype=BF16), random(3, 80, 300, dtype=BF16)
    chosen = torch.rand(40, 3).argsort(-1)[:, :2]
    expected = reference_expert_linear(x.double(), weight.double(), chosen, None)
    return lambda: assert_close(expert_linear(x, weight, route(chosen, 3)), expected)


FAMILIES: dict[str, tuple[str, Callable[[], Run]]] = {
    "decodes": ("split_kernel", decodes),
    "shared prefix": ("split_kernel", shared_prefix),
    "prompts by pointers": ("prefill_kernel", lambda: prompts(by_tma=False)),
    "prompts by TMA": ("prefill_kernel", lambda: prompts(by_tma=True)),
    "linear": ("_linear_kernel", products),
    "experts": ("_experts_kernel", experts),
}
# Between them they have every kind of wait.
QUICK = ("shared prefix", "prompts by TMA")


@pytest.fixture(autouse=True)
def _copies_are_late() -> Iterator[None]:
    """A copy that happened to have landed would need no wait."""
    assert isinstance(MACHINE, Emulator)
    checks = MACHINE.checks
    MACHINE.checks = replace(checks, is_watched=True, copies_are_late=True)
    yield
    MACHINE.checks = checks


def is_noticed(program: Program, mutated: str, run: Run) -> bool:
    """Whether the kernel fails without something: reported, or by its result."""
    assert isinstance(MACHINE, Emulator)
    MACHINE.substitutes[program] = Program(mutated)
    try:
        run()
    except (EmulatorError, AssertionError):
        return True
    finally:
        del MACHINE.substitutes[program]
    return False


def launched(family: str) -> tuple[Program, Run]:
    assert isinstance(MACHINE, Emulator)
    name, make = FAMILIES[family]
    run = make()
    run()
    return MACHINE.launched[name], run


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.nightly) for f in FAMILIES],
)
def test_kernel_fails_without_any_wait(family: str) -> None:
    program, run = launched(family)
    for site in sites(program.ptx):
        if site.kind != "barrier":
            assert is_noticed(program, without(program.ptx, site), run), site


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_fails_without_any_barrier_that_it_needs(family: str) -> None:
    """Clocks order all accesses that are executed, so a barrier whose loss is not noticed is one
    that others make redundant: it stays away while the rest are tried."""
    program, run = launched(family)
    barriers = [site for site in sites(program.ptx) if site.kind == "barrier"]
    redundant: list[Site] = []
    for site in barriers:
        if not is_noticed(program, without(program.ptx, *redundant, site), run):
            assert is_noticed(program, trapped(program.ptx, site), run), f"{site} is not executed"
            redundant.append(site)
    places = [program.source_of(site.index + 1) for site in redundant]
    print(f"{family}: {len(barriers)} barriers, {len(redundant)} redundant: {places}")
    assert len(redundant) < len(barriers)
