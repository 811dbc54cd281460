"""Argument checks that all kernel launchers share, and differences in Triton's interpreter.

Launchers run on the current device and stream, never synchronize, allocate their results and
scratch, and raise `ValueError` with a sentence that names the value and says what to do. What is
the same in every step (a layer's cache, rule and tables) is checked once, as it is put together.
"""

import functools

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import FP8_CAPABILITY

# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), whose `tl.dot` multiplies the
# bit patterns of bf16 and so needs float32. A constant in compiled kernels.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


@functools.cache
def host_runs_kernels() -> bool:
    """Returns whether kernels run on the CPU and in its memory: in Triton's interpreter, or by a
    driver whose device is the CPU, as that of tests."""
    if INTERPRETED.value:
        return True
    try:
        device: torch.device = triton.runtime.driver.active.get_active_torch_device()
    except RuntimeError:  # no driver: there is no GPU
        return False
    return device.type == "cpu"


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless the tensor has `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; must have {shape}")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; must be {names}")


def check_packed(name: str, tensor: torch.Tensor, num_dims: int = 1) -> None:
    """Raises `ValueError` unless the last `num_dims` dimensions are contiguous in memory."""
    if tensor.is_contiguous():
        return
    expected = 1
    for size, stride in zip(tensor.shape[::-1], tensor.stride()[::-1], strict=True):
        if not num_dims:
            return
        if size > 1 and stride != expected:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; its last "
                "dimensions must be contiguous: call .contiguous() on it"
            )
        expected *= size
        num_dims -= 1


def check_pool_views(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises `ValueError` unless K and V, `[num_blocks, num_kv_heads, block_size, head_dim]` each,
    can be views of one pool: with equal strides of blocks and of heads, and contiguous below."""
    for name, tensor in (("keys", keys), ("values", values)):
        check_packed(name, tensor, 2)
    if keys.stride()[:2] != values.stride()[:2]:
        raise ValueError(
            f"keys have strides of blocks and heads of {keys.stride()[:2]} and values of "
            f"{values.stride()[:2]}; both must be views of one pool"
        )


def check_fp8(tensor: torch.Tensor) -> None:
    """Raises `ValueError` for an fp8 (e4m3) tensor on a GPU below compute capability 8.9."""
    if tensor.dtype != torch.float8_e4m3fn or not tensor.is_cuda:
        return
    capability = torch.cuda.get_device_capability(tensor.device)
    if capability < FP8_CAPABILITY:
        raise ValueError(
            f"an fp8 (e4m3) KV cache needs compute capability 8.9 (Ada) or newer; this GPU has "
            f"{capability[0]}.{capability[1]}: choose bfloat16 or float16 for the cache"
        )
