"""Fields of the structures that functions of the C library take their arguments in."""

import ctypes

Fields = tuple[tuple[str, type[ctypes.c_void_p] | type[ctypes.c_int64]], ...]


def pointer_fields(*names: str) -> Fields:
    """Returns fields of addresses, which are 0 for None."""
    return tuple((name, ctypes.c_void_p) for name in names)


def size_fields(*names: str) -> Fields:
    """Returns fields of `int64_t`."""
    return tuple((name, ctypes.c_int64) for name in names)
