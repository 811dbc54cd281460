"""Memory that the load of a GGUF model takes: the result and one tensor of it."""

import subprocess
import sys
from pathlib import Path

from tests.support.engine.checkpoints import small_config
from tests.support.gguf.models import random_model
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf

LOAD = """
import sys
from pathlib import Path

from baton.engine.executor.models import loader
from baton.engine.executor.models.quantized import gguf
from baton.models import checkpoint_folder
from tests.support.engine.engines import config_of

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

import transformers.models.llama.modeling_llama

folder = str(checkpoint_folder(sys.argv[1], ()))
config = loader.load_config(folder)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory("VmRSS")
model = loader.load_model(folder, config, config_of(), "eager")
print(memory("VmHWM") - before, sum(w.nbytes for w in model.state_dict().values()))
"""
SLACK = 30 << 20  # bytes, for buffers of values and for what a first load imports


def test_gguf_load_holds_result_and_one_tensor(tmp_path: Path) -> None:
    config = small_config(
        "LlamaConfig", hidden_size=512, intermediate_size=1024, num_hidden_layers=8, vocab_size=398
    )
    file = tmp_path / "model.gguf"
    write_gguf(file, random_model(config), sentence_piece(), lambda _name: "Q4_K")
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    peak, result = map(int, ended.stdout.split())
    assert result > 2 * SLACK
    assert peak < result + 4 * 512 * 1024 + SLACK
