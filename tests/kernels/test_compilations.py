"""Compilation meter: counts what Triton compiles after the warm-up, and says what it was."""

from typing import Any

import pytest
import triton

from baton_kernels.compilations import CompilationMeter


def test_compilation_meter_counts_from_start_and_names_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    earlier: list[Any] = []
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **found: earlier.append(found))
    meter = CompilationMeter()
    runtime.jit_post_compile_hook(repr="at load")
    assert meter.num_late == 0
    meter.start()
    runtime.jit_post_compile_hook(repr="split_kernel[num_warps=4]")
    assert meter.num_late == 1
    assert len(earlier) == 2
    assert "split_kernel[num_warps=4]" in caplog.text
