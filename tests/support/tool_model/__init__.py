"""Tool model: a small checkpoint that has learned to call tools in each of two formats.

`train.py` makes it. The formats share the weights: the chat template tells the model which to use.
"""

import shutil
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

_HERE = Path(__file__).parent
CHECKPOINT = _HERE / "checkpoint"
FORMATS = ("hermes", "llama3_json")


@cache
def template_of(name: str) -> str:
    """Returns the chat template of a format."""
    return (_HERE / f"{name}.jinja").read_text()


def save_tool_model(name: str, folder: Path) -> Path:
    """Writes the checkpoint with the chat template of a format, and returns the folder."""
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template_of(name))
    return folder


def save_agent_model(folder: Path) -> Path:
    """Writes the checkpoint for coding agents, and returns the folder. They set no temperature: its
    logits are so far apart that samples are the most likely tokens."""
    save_tool_model("agent", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 8  # exact in bfloat16
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
