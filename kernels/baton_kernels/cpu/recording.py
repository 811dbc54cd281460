"""Recordings of calls of the C library, which are repeated by one call.

Every function of the library takes one structure of arguments. A recording keeps the structures of
a block, and the tensors that they point to, whose contents the caller may change before it repeats
them: as CUDA graphs are recorded and replayed. What torch computes in the block is not recorded, so
that a block with such an operation cannot be repeated.
"""

import ctypes
import threading
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton_kernels.cpu.arguments import pointer_fields
from baton_kernels.cpu.library import KERNELS, load

_aten = torch.ops.aten
_NEW_MEMORY: Final = {_aten.empty.memory_format, _aten.new_empty.default}


class _Recorded(ctypes.Structure):
    """One call, as `Recorded` in recording.c."""

    _fields_ = pointer_fields("function", "arguments")


class _Active(threading.local):
    recording: "Recording | None" = None


_active = _Active()


class Recording(TorchDispatchMode):
    """Calls of the library in a `with` block of this thread, which makes them too.

    Attributes:
        can_repeat: whether all that the block computed was by calls of the library.
    """

    def __init__(self) -> None:
        super().__init__()
        self.can_repeat = True
        self._calls: list[tuple[int, ctypes.Structure]] = []
        self._kept: list[object] = []
        self._repeat = load(KERNELS).baton_repeat
        self._repeat.restype = None

    def __enter__(self) -> Self:
        _active.recording = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _active.recording = None
        calls = [_Recorded(function, ctypes.addressof(call)) for function, call in self._calls]
        self._array = (_Recorded * len(calls))(*calls)

    def __torch_dispatch__(
        self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.can_repeat &= operation in _NEW_MEMORY or _is_view(operation, args, result)
        return result

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, function: Any, call: ctypes.Structure, kept: tuple[object, ...]) -> None:
        """Records a call, and keeps what it points to."""
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self._calls.append((address, call))
        self._kept += kept

    def repeat(self) -> None:
        """Makes all calls again, over the same memory."""
        self._repeat(self._array, ctypes.c_int64(len(self._array)))


def launch(function: Any, call: ctypes.Structure, *kept: object) -> None:
    """Calls a function of the library, and records it if this thread does.

    Args:
        kept: what `call` points to.
    """
    function(ctypes.byref(call))
    if (recording := _active.recording) is not None:
        recording.add(function, call, kept)


def _is_view(operation: Any, args: Any, result: Any) -> bool:
    """Returns whether an operation wrote nothing, and all its results are parts of its arguments'
    memory. Some are views of one tensor and copies of another."""
    if operation._schema.is_mutable:
        return False
    given, made = (
        {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if torch.is_tensor(leaf)}
        for tree in (args, result)
    )
    return made <= given
