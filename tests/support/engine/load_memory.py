"""Memory that the load of a model takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

SLACK = 30 << 20
"""Bytes for buffers of values, and for what a first load imports."""
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 512, 1024, 8
"""Sizes of a Llama whose weights are more than twice that."""
LARGEST_BYTES = 4 * HIDDEN_SIZE * INTERMEDIATE_SIZE
"""Bytes of its largest tensor of a layer in float32."""

_LOAD = """
import sys
from pathlib import Path

import transformers.models.llama.modeling_llama

from baton.engine.executor.models import loader
from baton.engine.executor.models.quantized import gguf
from baton.models import checkpoint_folder
from tests.support.engine.engines import config_of

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

folder = str(checkpoint_folder(sys.argv[1], ()))
config = loader.load_config(folder)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory("VmRSS")
model = loader.load_model(folder, config, config_of(kernels=sys.argv[2]), "eager")
print(memory("VmHWM") - before, sum(w.nbytes for w in model.state_dict().values()))
"""


def load_memory(model: Path, kernels: str) -> tuple[int, int]:
    """Returns the bytes of a load at its peak, and those of its result as plain weights."""
    ended = subprocess.run(
        [sys.executable, "-c", _LOAD, str(model), kernels],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    peak, result = map(int, ended.stdout.split())
    assert result > 2 * SLACK
    return peak, result
