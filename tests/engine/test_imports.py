"""Imports of the engine at run time: it runs where little else is installed."""

import subprocess
import sys

import pytest

# Of the serving side and of features that a bare engine does without.
NOT_NEEDED = ("redis", "opentelemetry", "grpc", "rich", "pydantic", "llguidance", "typer")
NOT_NEEDED += ("PIL", "torchvision")  # of images, which a text model does without
NOT_NEEDED += ("triton",)  # of GPUs
NOT_IMPORTED = (
    "transformers.models.clip",
    "transformers.image_processing",
    "baton.engine.executor.vision.prompt",
)

SCRIPT = f"""
import sys

import pytest
for name in {NOT_NEEDED}:
    sys.modules[name] = None
from baton.engine import LLM, EngineConfig, SamplingParams
engine = LLM.from_pretrained(sys.argv[1], EngineConfig(device="cpu", num_blocks=8))
(result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
imported = [name for name in sys.modules if name.startswith({NOT_IMPORTED})]
print(len(result.token_ids), imported, engine.core.cache.encoder_pool)
"""


@pytest.mark.slow  # `make check` forbids the imports of the engine's own modules
def test_engine_runs_without_packages_of_servers_images_and_gpus(checkpoints):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, checkpoints["llama"]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("4 [] None", 0), done.stderr


def test_engine_is_the_former_name_of_llm():
    from baton.engine import LLM, Engine

    assert Engine is LLM
