"""Runs engines on our kernels on the CPU, in Triton's interpreter and a process of their own; and
what is said where they cannot run."""

import os
import subprocess
import sys

import pytest

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.errors import InvalidArgumentError
from tests.engine.conftest import Checkpoints
from tests.support.repository import ROOT


def run(selection: str, names: str, timeout: float) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", selection, "-k", names]
    result = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "--durations=5"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


# Apart from the rest, so that none of these runs takes long.
CACHES_AND_MODULES = "fp8 or kernel_modules"
# One engine, and what takes no engine.
SHORT = "tokens_are_those_of_torch or is_swapped or swapped_modules or scored_as_on_the_cpu"


def test_an_engine_on_kernels_gives_the_tokens_of_one_on_torch() -> None:
    run("not slow and not gpu", SHORT, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_on_kernels_follow_all_rules_like_those_on_torch() -> None:
    run("not slow and not gpu", f"not ({SHORT} or {CACHES_AND_MODULES})", timeout=540)


@pytest.mark.slow
def test_fp8_caches_and_modules_on_kernels_give_the_same_tokens() -> None:
    run("not slow and not gpu", f"({CACHES_AND_MODULES}) and not ({SHORT})", timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fp8_caches_and_modules_of_all_families_on_kernels_give_the_same_tokens() -> None:
    run("slow and not gpu", CACHES_AND_MODULES, timeout=540)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_of_all_families_on_kernels_give_the_tokens_of_those_on_torch() -> None:
    run("slow and not gpu", f"not (deterministic_request or {CACHES_AND_MODULES})", timeout=840)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_in_the_deterministic_mode_give_the_same_bits_in_any_batch() -> None:
    run("slow and not gpu", "deterministic_request", timeout=840)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kernels": "triton"}, "kernels: is 'triton', which needs Triton's kernels; they run on"),
        ({"deterministic": True}, "deterministic: is True, which needs Triton's kernels; they run"),
        ({"kernels": "torch", "deterministic": True}, "deterministic: is set, which needs kernels"),
    ],
)
def test_kernels_that_are_asked_for_and_cannot_run_are_an_error(
    checkpoints: Checkpoints, changes: dict[str, object], sentence: str
) -> None:
    def start() -> None:
        config = EngineConfig(device="cpu", num_blocks=8, **changes)  # type: ignore[arg-type]
        Engine.from_pretrained(checkpoints["llama"], config)

    with pytest.raises(InvalidArgumentError, match=sentence):
        start()


def test_heads_of_a_size_that_kernels_do_not_have_are_an_error_that_names_those_they_have(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU cannot run is not looked at, so this one is taken for what interprets kernels."""
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    config = EngineConfig(device="cpu", num_blocks=8, kernels="triton")
    with pytest.raises(InvalidArgumentError, match=r"a head size of .* has no attention kernel"):
        Engine.from_pretrained(checkpoints["llama"], config)
