"""Products whose layers are those of a file, and the products that write it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NoReturn

import torch

from baton.engine.executor.models.linear import LayersBeside, Linear, Parts, Products
from baton.engine.executor.models.packed.tensor_file import TensorFile, TensorFileWriter
from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.panels import AnyPanels, CodePanels, NumberPanels

_Record = dict[str, Any]
_PANELS: Mapping[str, type[AnyPanels]] = {
    each.__name__: each for each in (NumberPanels, CodePanels)
}


class NotPackedError(Exception):
    """A layer is none of kernels in C: torch has it in a form of its own."""


class WritingLayers:
    """`Products` that write each layer to a file, and keep none.

    Attributes:
        records: of the layers, in the order in which a model asks for them.
    """

    def __init__(self, products: Products, writer: TensorFileWriter) -> None:
        self.execution = products.execution
        self.records: list[list[_Record]] = []
        self._products = products
        self._writer = writer

    def layer(self, parts: Parts) -> Linear:
        """Raises `NotPackedError`."""
        return self._write(self._products.layer(parts))

    def head(self, parts: Parts) -> Linear:
        """Raises `NotPackedError`."""
        return self._write(self._products.head(parts))

    def _write(self, linear: Linear) -> Linear:
        layers = linear.layers if isinstance(linear, LayersBeside) else [linear]
        self.records.append([self._record(each) for each in layers])
        return _Written()

    def _record(self, linear: Linear) -> _Record:
        if not isinstance(linear, PackedLinear):
            raise NotPackedError(f"a {type(linear).__name__} has a form of its own")
        panels = linear.panels
        values = {each.name: self._value(getattr(panels, each.name)) for each in fields(panels)}
        return {
            "panels": [type(panels).__name__, values],
            "bias": self._value(linear.bias),
            "dtype": self._value(linear.dtype),
        }

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._writer.add(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return value


class _Written:
    """Layer that is in the file."""

    def __call__(self, x: torch.Tensor) -> NoReturn:
        raise AssertionError(f"{len(x)} rows for a layer that is not to compute any")

    def plus(self, x: torch.Tensor, _residual: torch.Tensor) -> NoReturn:
        self(x)


class MappedLayers:
    """`Products` of the layers of a file, in the order in which they were written. Weights of the
    checkpoint are not read."""

    def __init__(self, file: TensorFile, execution: str) -> None:
        self.execution = execution
        self._file = file
        self._records: Iterator[list[_Record]] = iter(file.record)

    def layer(self, _parts: Parts) -> Linear:
        layers = [self._layer(**record) for record in next(self._records)]
        return layers[0] if len(layers) == 1 else LayersBeside(layers)

    head = layer

    def _layer(self, panels: tuple[str, _Record], bias: Any, dtype: Any) -> PackedLinear:
        name, values = panels
        made = _PANELS[name](**{field: self._value(value) for field, value in values.items()})
        return PackedLinear(made, self._value(bias), self._value(dtype))

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self._file.tensor(value["tensor"])
        return getattr(torch, value["dtype"])
