"""Linear layer in the fastest form for its device and dtype: `PackedLinear` in C, or `TorchLinear`.

`Products` make a model's layers: `TORCH`, `IN_C`, or `QUANTIZED` at load. In C a
float32 weight is kept in bfloat16 if that loses nothing, as it does of a checkpoint in bfloat16:
half of the memory, and half of what a step of few rows waits for.

On GPUs, without a C compiler, and in bfloat16 on CPUs with AMX, whose tiles oneDNN knows to use,
torch multiplies. There, in float32 on a CPU, and in bfloat16 on one with instructions for it, the
weight is packed into oneDNN's layout, with which oneDNN uses the widest vector instructions. In
float32 that is on many CPUs about twice as fast as the BLAS call of `torch.nn.functional.linear`,
which remains for other devices and if oneDNN is not available; in bfloat16 it helps where rows are
few, by the same output. In bfloat16 on a CPU without instructions for it, oneDNN converts number by
number; several rows are multiplied in float32 instead, with a part of the weight converted at a
time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from baton.engine.executor.models.quantized.quantized_tensor import QuantizedTensor, held
from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.paged_attention import prompt_arithmetic
from baton_kernels.cpu.quantized_weight import joined, quantize

# With 8 rows and three sizes of weights float32 took 0.4 to 0.7 of the time, with 64 rows 0.2, and
# with 4 rows 0.9 to 1.2 of it (AVX2, one thread).
_MIN_ROWS = 8
_GROUP_SIZE = 32  # inputs with a scale of their own, if a layer is quantized
_MULTIPLE = 8  # inputs that codes are packed by
_PART = 2**20  # numbers of a weight that are converted at a time, so that they stay in the cache


class Linear(Protocol):
    """Linear layer y = x @ weight.T + bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y, `[rows, out_features]`, for `x`, `[rows, in_features]`."""
        ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual`, `[rows, out_features]`, plus y."""
        ...


# Makes the layer of a weight, `[out_features, in_features]`, and a bias.
LinearOf: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def linear_in_c(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Returns a layer of kernels in C, of torch for a weight that they do not take. Raises
    `NoLibraryError`."""
    is_plain = weight.dtype == torch.bfloat16 and not isinstance(weight, QuantizedTensor)
    if is_plain and not (_is_even(weight) and prompt_arithmetic(weight.dtype) != "AMX tiles"):
        return TorchLinear(weight, bias)
    return _packed_layer(weight, bias)


def _packed_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Returns a layer of kernels in C, of a weight that they take."""
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight.quantized, bias, weight.dtype)
    is_wide = weight.dtype == torch.float32
    packed = _narrowed(weight) if is_wide and _is_even(weight) else weight
    return PackedLinear(packed, bias, weight.dtype)


def _is_even(weight: torch.Tensor) -> bool:
    """Returns whether a weight has whole pairs of inputs, in which bfloat16 is packed."""
    return weight.shape[1] % 2 == 0


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Returns a float32 weight in bfloat16 if that loses nothing."""
    for part in (weight[:1], weight):  # most that would lose, do in their first row
        narrow = part.bfloat16()
        if not torch.equal(narrow.float(), part):
            return weight
    return narrow


def _quantized_in_c(bits: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Returns a layer of kernels in C in codes of 8 or 4 bits, of a weight that is not quantized
    yet."""
    size = math.gcd(weight.shape[1], _GROUP_SIZE)
    if size % _MULTIPLE or isinstance(weight, QuantizedTensor):
        return linear_in_c(weight, bias)
    return PackedLinear(quantize(weight, bits, size), bias, weight.dtype)


class TorchLinear:
    """Linear layer y = x @ weight.T + bias. After packing, the original weight may be freed."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        converts: Callable[[torch.Tensor], bool] | None = None,
        part: int = _PART,
    ) -> None:
        """Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`.
        converts: whether oneDNN would convert a weight number by number; None: as this CPU.
        part: numbers of such a weight that are converted at a time.
        """
        self._bias = bias
        self._is_converted = (converts or _is_converted)(weight)
        self._packed = None if self._is_converted else _pack(weight)
        self._weight = None if self._packed is not None else weight
        self._part = part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y, `[rows, out_features]`, for `x`, `[rows, in_features]`."""
        if self._weight is not None:
            if self._is_converted and len(x) >= _MIN_ROWS:
                return _in_float32(x, self._weight, self._bias, self._part)
            return F.linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual` + y, in one oneDNN call if the weight is packed, in float32."""
        if self._weight is not None or x.dtype != torch.float32:  # one call would not round y
            return self(x).add_(residual)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return out


Part: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias of a linear layer."""
Parts: TypeAlias = Callable[[], Sequence[Part]]
"""Reads the parts of a layer that concatenates their outputs, and have the same input."""


class Products(Protocol):
    """Makers of the linear layers of a model.

    Attributes:
        execution: what they add to the name of the model's implementation, if other numbers come of
            them than of the checkpoint's weights.
    """

    @property
    def execution(self) -> str: ...

    def layer(self, parts: Parts) -> Linear:
        """Returns a layer of the model's layers."""
        ...

    def head(self, parts: Parts) -> Linear:
        """Returns the model's head."""
        ...


@dataclass(frozen=True, slots=True)
class ProductsOf:
    """`Products` of layers that `layer_of` makes, and a head that `head_of` does."""

    layer_of: LinearOf
    head_of: LinearOf
    execution: str = ""

    def layer(self, parts: Parts) -> Linear:
        return merged_layer(self.layer_of, parts())

    def head(self, parts: Parts) -> Linear:
        return merged_layer(self.head_of, parts())


TORCH: Final = ProductsOf(TorchLinear, TorchLinear)
IN_C: Final = ProductsOf(linear_in_c, linear_in_c)
# By the setting. The head decides between tokens that are close: it has 8 bits.
QUANTIZED: Final[Mapping[str, Products]] = {
    "int8": ProductsOf(partial(_quantized_in_c, 8), partial(_quantized_in_c, 8), "-int8"),
    "int4": ProductsOf(partial(_quantized_in_c, 4), partial(_quantized_in_c, 8), "-int4"),
}


class LayersBeside:
    """Linear layers in C of the same input, whose outputs stand beside each other."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers: Final = layers
        self._widths = [layer.panels.out_features for layer in layers]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), sum(self._widths))
        for layer, part in zip(self.layers, out.split(self._widths, dim=1), strict=True):
            layer.write(x, part)
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


def merged(parts: Sequence[Part]) -> Part:
    """Returns weight and bias of one linear layer whose output concatenates those of all parts,
    which have the same input. The bias of a part without one is zero."""
    return torch.cat([w for w, _ in parts]), _merged_biases(parts)


def merged_layer(linear_of: LinearOf, parts: Sequence[Part]) -> Linear:
    """Returns the layer of all parts, as `merged`; of one part as it is. Codes of unlike kinds, and
    plain weights beside codes, are multiplied one after the other."""
    coded = [weight.quantized for weight, _ in parts if isinstance(weight, QuantizedTensor)]
    if not coded or len(parts) == 1:
        return linear_of(*(parts[0] if len(parts) == 1 else merged(parts)))
    whole = joined(coded) if len(coded) == len(parts) else None
    if whole is None:
        return LayersBeside([_packed_layer(weight, bias) for weight, bias in parts])
    dtype = parts[0][0].dtype
    return linear_of(QuantizedTensor(held(whole), dtype), _merged_biases(parts))


def _merged_biases(parts: Sequence[Part]) -> torch.Tensor | None:
    biases = [b for _, b in parts if b is not None]
    if not biases:
        return None
    return torch.cat([biases[0].new_zeros(len(w)) if b is None else b for w, b in parts])


def _is_converted(weight: torch.Tensor) -> bool:
    """Returns whether oneDNN would convert number by number."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _in_float32(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part_size: int
) -> torch.Tensor:
    """Returns x @ weight.T + bias, rounded to the dtype of `x` at the end."""
    out = x.new_empty(len(x), len(weight))
    wide, size = x.float(), max(1, part_size // weight.shape[1])
    for begin in range(0, len(weight), size):
        part = slice(begin, begin + size)
        added = None if bias is None else bias[part].float()
        out[:, part] = F.linear(wide, weight[part].float(), added)
    return out


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight in oneDNN's layout, or None if oneDNN does not apply."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
