"""Inputs of recorded decode steps, written by one call of the C library."""

import ctypes
import itertools
import logging
from collections.abc import Sequence

import numpy as np

from baton_kernels.attention.decode_inputs import DecodeInputs, KindInputs
from baton_kernels.attention.plan import Int32Array, Int64Array, Ranges, SharedPrefix
from baton_kernels.cpu.arguments import pointer_fields, size_fields
from baton_kernels.cpu.library import DECODE_INPUTS, NoLibraryError, load

logger = logging.getLogger(__name__)


class _Kind(ctypes.Structure):
    """Kind of layer, as `Kind` in decode_inputs.c."""

    _fields_ = size_fields(
        *("num_items", "num_shared_items", "members", "positions", "first_slots", "items"),
        *("shared_items", "max_items", "max_shared_items", "max_members", "max_partials"),
        *("least_split", "most_splits", "tile_keys", "members_per_shared_item", "window"),
    )


class _Shared(ctypes.Structure):
    """Prefixes that the layers of a kind attend once, as `Shared` in decode_inputs.c."""

    _fields_ = (
        *size_fields("num_prefixes"),
        *pointer_fields("sizes", "num_tokens", "members"),
    )


class _Layout(ctypes.Structure):
    """Layout of the inputs, as `Layout` in decode_inputs.c."""

    _fields_ = (
        *size_fields("num_groups", "num_kinds", "row_words", "block_size", "table_width"),
        *pointer_fields("tables", "kinds"),
    )


class CompiledDecodeInputs(DecodeInputs):
    """`DecodeInputs` written by compiled code, unless decodes have drafts.

    Raises `NoLibraryError` if the library is not available.
    """

    def __init__(
        self, num_groups: int, max_rows: int, block_size: int, kinds: Sequence[KindInputs]
    ) -> None:
        super().__init__(num_groups, max_rows, block_size, kinds)
        self._function = load(DECODE_INPUTS).baton_write_decode_inputs
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._function.argtypes = (*[pointer] * 4, number, number, pointer)
        self._function.restype = ctypes.c_int64
        self._kinds = (_Kind * len(kinds))(*map(_kind, self.kinds, self.places))
        self._shared = (_Shared * len(kinds))()
        self._pointers = (ctypes.c_void_p * num_groups)()
        self._tables: Sequence[Int32Array] = ()  # whose addresses the layout has
        self._layout = _Layout(
            num_groups=num_groups,
            num_kinds=len(kinds),
            row_words=self.header[1],
            block_size=block_size,
            tables=ctypes.addressof(self._pointers),
            kinds=ctypes.addressof(self._kinds),
        )

    def write(
        self,
        inputs: Int32Array,
        ranges: Ranges,
        tables: Sequence[Int32Array],
        num_rows: int,
        shared: Sequence[Sequence[SharedPrefix]] = (),
    ) -> int | None:
        if not ranges.are_decodes:
            return super().write(inputs, ranges, tables, num_rows, shared)
        if tables is not self._tables:
            self._use(tables)
        shared = shared or [()] * len(self.kinds)
        columns = [self._share(i, prefixes) for i, prefixes in enumerate(shared)]
        end = self._function(
            ctypes.byref(self._layout),
            address(inputs),
            address(ranges.batch_slots),
            address(ranges.starts),
            len(ranges),
            num_rows,
            ctypes.byref(self._shared),
        )
        del columns  # not before the call has read them
        return None if end < 0 else int(end)

    def _share(self, index: int, prefixes: Sequence[SharedPrefix]) -> Sequence[Int64Array]:
        """Names the prefixes of a kind. Returns their columns, whose addresses the call reads."""
        struct = self._shared[index]
        struct.num_prefixes = len(prefixes)
        if not prefixes:
            return ()
        sizes = np.array([len(prefix.members) for prefix in prefixes], np.int64)
        num_tokens = np.array([prefix.num_tokens for prefix in prefixes], np.int64)
        members = np.concatenate([prefix.members for prefix in prefixes], dtype=np.int64)
        struct.sizes, struct.num_tokens, struct.members = map(address, (sizes, num_tokens, members))
        return sizes, num_tokens, members

    def _use(self, tables: Sequence[Int32Array]) -> None:
        assert len({table.shape for table in tables}) == 1, "tables of several shapes"
        self._pointers[:] = list(map(address, tables))
        self._layout.table_width = tables[0].shape[1]
        self._tables = tables


def decode_inputs(
    num_groups: int, max_rows: int, block_size: int, kinds: Sequence[KindInputs]
) -> DecodeInputs:
    """Returns `DecodeInputs`, compiled where a library is available."""
    try:
        return CompiledDecodeInputs(num_groups, max_rows, block_size, kinds)
    except NoLibraryError as error:
        logger.info("numpy writes the inputs of recorded steps: %s", error)
        return DecodeInputs(num_groups, max_rows, block_size, kinds)


def address(array: Int32Array | Int64Array) -> int:
    """Returns the address of a contiguous array, in half the time of `array.ctypes`."""
    interface = array.__array_interface__
    assert interface["strides"] is None, "the array is not contiguous"
    return int(interface["data"][0])


def _kind(kind: KindInputs, place: slice) -> _Kind:
    capacity = kind.capacity
    *places, _ = itertools.accumulate(capacity.sizes, initial=place.start)
    return _Kind(
        *places[:7],
        max_items=capacity.items,
        max_shared_items=capacity.shared_items,
        max_members=capacity.members,
        max_partials=kind.max_partials,
        least_split=kind.splits.least,
        most_splits=kind.splits.most,
        tile_keys=kind.tile_keys,
        members_per_shared_item=kind.tokens_per_shared_item,
        window=kind.window or 0,
    )
