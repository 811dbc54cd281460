"""The wheel beside Hugging Face's `kernels`, which transformers imports by that name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROMPT, NUM_TOKENS = list(range(3, 40)), 12
PROGRAM = """
import json, sys
import baton_kernels, kernels
from kernels import get_kernel
from transformers.utils import import_utils
from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from baton.sampling import SamplingParams

path, prompt, num_tokens = json.loads(sys.argv[1])
engine = LLM.from_pretrained(path, EngineConfig(device="cpu", dtype="float32", num_blocks=64))
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
(result,) = engine.generate([prompt], params)
files = [kernels.__file__, baton_kernels.__file__]
print(json.dumps([files, import_utils.is_kernels_available(), result.token_ids]))
"""


def install(folder: Path, name: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command = [*pip, "--target", folder, name]
    subprocess.run(command, check=True, capture_output=True, timeout=240)


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(None, id="as published", marks=pytest.mark.nightly),
        pytest.param("0.18.2", id="as transformers wants"),
    ],
)
def test_gpt_oss_runs_beside_the_package_kernels(wheel, version, tmp_path):
    """The index of a test may lack the versions that transformers accepts; then the number in the
    metadata is what makes transformers take the package."""
    folder = tmp_path / "site-packages"
    install(folder, wheel)
    install(folder, "kernels")
    if version is not None:
        (metadata,) = folder.glob("kernels-*.dist-info/METADATA")
        told = re.sub(r"(?m)^Version: .*", f"Version: {version}", metadata.read_text())
        metadata.write_text(told)
    path = str(tmp_path / "gpt_oss")
    save_random(FAMILIES["gpt_oss"](), Path(path))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, json.dumps([path, PROMPT, NUM_TOKENS])],
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    files, is_available, token_ids = json.loads(done.stdout.splitlines()[-1])
    assert all(file.startswith(str(folder)) for file in files)
    assert is_available or version is None
    assert tuple(token_ids) == Oracle()(path, PROMPT, NUM_TOKENS)
