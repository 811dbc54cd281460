"""Compilation meter: kernels that Triton compiled, or loaded from its disk cache, after warm-up."""

import logging
from typing import Any

import triton

logger = logging.getLogger(__name__)


class CompilationMeter:
    """Compilation meter of this process, whose kernels all count.

    Attributes:
        num_late: kernels compiled since `start`; each stalled the step that launched it.
    """

    def __init__(self) -> None:
        self.num_late = 0
        self._next: Any = None

    def start(self) -> None:
        """Begins to count, at the end of warm-up. Call once."""
        # Triton has one hook per process: the one that was set before is called, too.
        runtime: Any = triton.knobs.runtime
        self._next, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, self._compiled

    def _compiled(self, **compilation: Any) -> Any:
        self.num_late += 1
        logger.warning("kernel compiled while serving: %s", compilation.get("repr"))
        return self._next(**compilation) if self._next is not None else None
