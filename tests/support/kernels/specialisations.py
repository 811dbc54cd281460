"""Specialisation keys of launches: Triton compiles a kernel for each, so a key seen first while
serving is a stall. Keys are Triton's own, for a GPU, while its interpreter runs the kernels."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from baton_kernels.compile import MODULES, variants

Key = tuple[str, str]


def forget_compilations() -> None:
    """Has Triton compile each kernel again at its next launch, or load it from the disk."""
    for module in MODULES:
        for variant in variants(module):
            variant.kernel.device_caches.clear()


@contextlib.contextmanager
def recorded_keys() -> Iterator[set[Key]]:
    """Yields the set of (kernel, key) of the launches in the `with` block."""
    keys: set[Key] = set()
    for module in map(importlib.import_module, MODULES):
        for kernel in {variant.kernel for variant in variants(module.__name__)}:
            kernel.add_pre_run_hook(_recorder(kernel, keys))
    try:
        yield keys
    finally:
        for module in MODULES:
            for variant in variants(module):
                variant.kernel.pre_run_hooks.clear()


def _recorder(kernel: Any, keys: set[Key]) -> Callable[..., None]:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    compiled = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
    bind = create_function_from_signature(compiled.signature, compiled.params, backend)

    def note(*args: Any, **kwargs: Any) -> None:
        _, specialization, options = bind(*args, **kwargs)
        keys.add((kernel.__name__, f"{specialization} {sorted(options.items())}"))

    return note
