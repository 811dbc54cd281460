"""Norms and gated MLPs of models that run as transformers has them, on our kernels: what is
swapped, that nothing comes out otherwise, and what is left alone."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.executor.models.triton.kernel_modules import swap_modules
from tests.support.kernels.engine_families import GENERIC, GREEDY, tokens

torch.set_num_threads(1)

# RMSNorms of two layers (one of a head is one, and so is the last), those with the residual before
# them, and gated MLPs.
SWAPPED = {
    "gemma2": (9, 0, 0),
    "gemma3": (13, 0, 0),
    "olmo2": (9, 0, 2),
    "cohere2": (0, 0, 2),
    "granite": (5, 0, 2),
    "glm": (5, 2, 2),
    "phi3": (5, 2, 2),
    "starcoder2": (0, 0, 0),
    "llama_gelu": (5, 2, 0),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=SLOW if f == "glm" else NIGHTLY) for f in GENERIC]
)
def test_swapped_modules_of_other_families_keep_torch_tokens(
    folder: Any, load: Any, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    with caplog.at_level(logging.INFO, "baton.engine.executor.triton_backend"):
        engine = load(folder(family), max_num_batched_tokens=24)
    (line,) = (text for text in caplog.messages if "our kernels compute" in text)
    assert tuple(map(int, re.findall(r" (\d+) ", line))) == SWAPPED[family], line
    assert tokens(engine) == tokens(load(folder(family), kernels="torch", device="cpu"))


def test_fused_residual_norm_leaves_the_layer_input_unchanged(folder: Any, load: Any) -> None:
    engine, seen = load(folder("glm"), async_scheduling=False), []

    def before(_layer: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append(args[0].clone())

    def after(_layer: nn.Module, args: tuple[torch.Tensor], _out: torch.Tensor) -> None:
        assert torch.equal(args[0], seen[-1])

    for layer in engine.core.runner.model._model.model.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    engine.generate([[5, 6, 7]], GREEDY)
    assert len(seen) == 2 * GREEDY.max_tokens


class RMSNorm(nn.Module):
    """With what may go wrong in one, by name."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        if kind == "of several heads":
            self.weight = nn.Parameter(1 + 0.3 * torch.randn(2, width // 2))
        if kind == "with a bias":
            self.bias = nn.Parameter(torch.zeros(width))
        self.eps = {"without eps": None, "eps is another's": 1e-2}.get(kind, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.float()
        if self.kind == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.kind == "clamped":
            x = x.clamp(-10, 10)
        if self.kind == "of several heads":
            x = x.unflatten(-1, (2, -1))
        eps = 1e-5
        mean = x.square().mean(-1, keepdim=True)
        if self.kind == "eps outside the root":
            out = x / (mean.sqrt() + eps)
        elif self.kind == "eps as a bound":
            out = x / mean.clamp(min=eps).sqrt()
        else:
            out = x * (mean + eps).rsqrt()
        weight = self.weight.float() + {"one more": 1.0, "half more": 0.5}.get(self.kind, 0.0)
        out = out * weight
        if self.kind == "of several heads":
            out = out.flatten(-2)
        return out.to(dtype)


class LayerNorm(RMSNorm):
    """An RMSNorm by another name, which is left alone."""


class Mlp(nn.Module):
    """Gated, with what may be otherwise, by name."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        has_bias = kind == "with biases"
        if kind == "in one":
            self.gate_up_proj = nn.Linear(width, 96, bias=False)
        else:
            self.gate_proj = nn.Linear(width, 48, bias=has_bias)
            self.up_proj = nn.Linear(width, 48, bias=has_bias or kind == "with one bias")
        self.down_proj = nn.Linear(48, width, bias=has_bias)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor, note: str = "") -> torch.Tensor:
        if note:
            self.seen.append(note)
        gate, up = (
            self.gate_up_proj(x).chunk(2, dim=-1)
            if self.kind == "in one"
            else (self.gate_proj(x), self.up_proj(x))
        )
        if self.kind == "the other way round":
            gate, up = up, gate
        if self.kind == "clamped":
            gate = gate.clamp(max=7.0)
        activation: Callable[[torch.Tensor], torch.Tensor] = {
            "gelu": F.gelu, "relu": F.relu, "tanh gelu": lambda g: F.gelu(g, approximate="tanh"),
            "quick gelu": lambda g: g * torch.sigmoid(1.702 * g),
        }.get(self.kind, F.silu)  # fmt: skip
        out = self.down_proj(activation(gate) * up)
        return out * 0.9 if self.kind == "scaled" else out


def swapped_alone(module: nn.Module, device: str, dtype: torch.dtype) -> bool:
    """Whether a model of this module alone has it swapped."""
    module.to(device, dtype).requires_grad_(False)
    swapped = swap_modules(nn.ModuleList([module]))
    return bool(swapped.num_norms + swapped.num_mlps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "is_swapped"),
    [
        ("plain", True),
        ("one more", True),
        ("half more", False),
        ("centred", False),
        ("clamped", False),
        ("eps outside the root", False),
        ("eps as a bound", False),
        ("eps is another's", False),
        ("without eps", False),
        ("with a bias", False),
        ("of several heads", False),
    ],
)
def test_norm_is_swapped_only_if_it_is_an_rms_norm(
    device: str, dtype: torch.dtype, kind: str, is_swapped: bool
) -> None:
    assert swapped_alone(RMSNorm(kind, 80), device, dtype) is is_swapped
    assert not swapped_alone(LayerNorm(kind, 80), device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "is_swapped"),
    [
        ("plain", True),
        ("with biases", True),
        ("with one bias", True),
        ("in one", True),
        ("gelu", False),
        ("tanh gelu", False),
        ("quick gelu", False),
        ("relu", False),
        ("clamped", False),
        ("scaled", False),
        ("the other way round", False),
    ],
)
def test_mlp_is_swapped_only_if_silu_opens_its_gate(
    device: str, dtype: torch.dtype, kind: str, is_swapped: bool
) -> None:
    torch.manual_seed(1)
    assert swapped_alone(Mlp(kind, 64), device, dtype) is is_swapped


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (1, 3, 64)) for dtype in DTYPES),
        *((torch.float32, shape) for shape in [(64,), (2, 64), (1, 2, 1, 64), (0, 64)]),
    ],
    ids=str,
)
@torch.inference_mode()
def test_swapped_modules_keep_outputs_and_weights(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    for module in (RMSNorm("plain", 64), RMSNorm("one more", 64), Mlp("with biases", 64)):
        module.to(device, dtype).requires_grad_(False)
        expected = module(x)
        weights = {name: weight.clone() for name, weight in module.state_dict().items()}
        swap_modules(module)
        found = module(x)
        assert found.shape == expected.shape
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        after = module.state_dict()
        assert all(torch.equal(weight, after[name]) for name, weight in weights.items())


@torch.inference_mode()
def test_swapped_modules_delegate_unsupported_calls(device: str) -> None:
    norm, mlp = RMSNorm("plain", 64).to(device), Mlp("plain", 64).to(device)
    swap_modules(nn.ModuleList([norm, mlp]))
    apart = torch.randn(1, 3, 4, 64, device=device).transpose(1, 2)
    assert norm(apart).stride() == apart.stride(), "not that of transformers"
    torch.testing.assert_close(norm(apart), norm(apart.contiguous()))
    half = torch.randn(3, 64, device=device).half()
    assert norm(half).dtype == torch.float16
    torch.testing.assert_close(mlp(apart, note="asked"), mlp(apart), rtol=1e-4, atol=1e-5)
    assert mlp.seen == ["asked"]


def test_swapped_mlp_stores_merged_projections_once(device: str) -> None:
    mlp = Mlp("with biases", 64).to(device).requires_grad_(False)
    swap_modules(nn.ModuleList([mlp]))
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert gate.untyped_storage().nbytes() == 4 * (gate.numel() + up.numel())
