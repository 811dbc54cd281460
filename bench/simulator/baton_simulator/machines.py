"""Machines by name, and from files that `python -m bench steps --json` has written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.errors import InvalidArgumentError
from baton_simulator.fit import machine_from
from baton_simulator.latency import Machine, Network, Roofline

_TOKENS_PER_STEP = 2048
_NETWORK_BANDWIDTH = 50e9  # bytes/s: 400 Gbit/s
_ENCODER_CACHE_BYTES = 2**30
_NUM_BYTES = 2  # of a number in bfloat16


def h200_8b() -> Machine:
    """One H200 with an 8B model (`Roofline`)."""
    return _gpu(Roofline(), memory=141e9)


def h100_llava_7b() -> Machine:
    """One H100 with LLaVA-1.5-7B: Vicuna of 6.74e9 parameters, and a CLIP ViT-L/14 at 336 pixels
    (23 of its layers are used, hidden size 1024, 4 times that in between, 577 patches), which takes
    0.68e9 FLOP for each of the 576 tokens of an image, its projector included: 8% of the seconds
    that prefill takes for a token."""
    steps = _h100(
        num_parameters=6.74e9,
        num_layers=32,
        num_heads=32,
        kv_bytes_per_token=2.0 * 32 * 32 * 128 * _NUM_BYTES,
        encoder_flops_per_token=_vit_flops(23, 1024, 2 * 4096, 577) + 2 * (1024 + 4096) * 4096,
    )
    return _gpu(steps, memory=80e9, num_image_tokens=576, hidden_size=4096)


def h100_qwen_vl_7b() -> Machine:
    """One H100 with Qwen2.5-VL-7B: 7.6e9 parameters without its encoder, which has 32 layers
    (hidden size 1280, gated 3420), four patches to a token, and sees 64 patches at once, but all of
    an image in four layers: 5.6e9 FLOP for a token of an image of a megapixel (1,296 tokens), and
    55% of the seconds that prefill takes for one."""
    in_windows = _vit_flops(28, 1280, 3 * 3420, 64)
    in_full = _vit_flops(4, 1280, 3 * 3420, 4 * 1296)
    steps = _h100(
        num_parameters=7.6e9,
        num_layers=28,
        num_heads=28,
        kv_bytes_per_token=2.0 * 28 * 4 * 128 * _NUM_BYTES,
        encoder_flops_per_token=4 * (in_windows + in_full) + 2 * (5120 + 3584) * 5120,
    )
    return _gpu(steps, memory=80e9, num_image_tokens=16_384, hidden_size=3584)


def h100_gemma_4b() -> Machine:
    """One H100 with Gemma 3 4B: 3.88e9 parameters without its encoder, a SigLIP so400m (27 layers,
    hidden size 1152, 4304 in between) that sees 4,096 patches of an image and makes 256 tokens of
    them: 21e9 FLOP for a token, and 4.1 times the seconds that prefill takes for one. Windows of
    its layers are not counted."""
    steps = _h100(
        num_parameters=3.88e9,
        num_layers=34,
        num_heads=8,
        head_dim=256,
        kv_bytes_per_token=2.0 * 34 * 4 * 256 * _NUM_BYTES,
        encoder_flops_per_token=16 * _vit_flops(27, 1152, 2 * 4304, 4096),
    )
    return _gpu(steps, memory=80e9, num_image_tokens=256, hidden_size=2560)


def _h100(**model: Any) -> Roofline:
    """An H100 SXM by its data sheet: 989e12 dense bfloat16 FLOP/s and 3.35e12 bytes/s."""
    return Roofline(peak_bandwidth=3.35e12, **model)


def _vit_flops(num_layers: int, hidden_size: int, gated_size: int, num_patches: int) -> float:
    """Returns the FLOP of a vision transformer for one patch that attends to `num_patches`: in each
    layer four square matrices, and two or three of `hidden_size` that make `gated_size` together.
    """
    linear = 2.0 * (4 * hidden_size + gated_size) * hidden_size
    return num_layers * (linear + 4.0 * hidden_size * num_patches)


def _gpu(
    steps: Roofline, *, memory: float, num_image_tokens: int = 0, hidden_size: int = 0
) -> Machine:
    """Returns a machine with 90% of `memory` for weights and KV, the defaults of a worker on a GPU
    but for a GiB of encoder outputs, and a network of 400 Gbit/s for handoffs and encoder outputs;
    2 ms for a request's way and 1 ms for a handoff's are taken to be so.

    Args:
        memory: bytes.
        num_image_tokens: most of an image; 0: the model takes no images.
        hidden_size: numbers of an encoder output for a token.
    """
    kv_bytes = 0.9 * memory - _NUM_BYTES * steps.num_parameters
    row_bytes = _NUM_BYTES * hidden_size
    network = Network(
        2e-3,
        1e-3,
        steps.kv_bytes_per_token / _NETWORK_BANDWIDTH,
        per_encoder_token=row_bytes / _NETWORK_BANDWIDTH,
    )
    num_kv_tokens = int(kv_bytes / steps.kv_bytes_per_token)
    machine = Machine(steps, network, num_kv_tokens, 256, _TOKENS_PER_STEP)
    if not num_image_tokens:
        return machine
    budget = max(_TOKENS_PER_STEP, num_image_tokens)
    cache_tokens = max(4 * budget, _ENCODER_CACHE_BYTES // row_bytes)
    return replace(machine, encoder_budget=budget, encoder_cache_tokens=cache_tokens)


PRESETS: dict[str, Callable[[], Machine]] = {
    "h200-8b": h200_8b,
    "h100-llava-7b": h100_llava_7b,
    "h100-qwen-vl-7b": h100_qwen_vl_7b,
    "h100-gemma-4b": h100_gemma_4b,
}


def machine_of(name: str) -> Machine:
    """The preset of that name, or the machine that the file of that name was measured on.

    Raises `InvalidArgumentError` for a name that is neither, or a file that says something else.
    """
    if name in PRESETS:
        return PRESETS[name]()
    path = Path(name)
    if not path.is_file():
        raise InvalidArgumentError(
            "--latency-model", f"is {name!r}; must be {' or '.join(PRESETS)}, or a file"
        )
    return machine_from(path)
