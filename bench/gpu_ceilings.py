"""Ceilings of the GPU of this machine: what its memory and its arithmetic give at best.

python -m bench.gpu_ceilings FILE
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.gpu_timing import copy_bandwidth, matrix_peak


def ceilings() -> dict[str, Any]:
    """Returns the device's and the libraries' names, bytes copied per second (read and written) and
    operations per second of a bf16 product."""
    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_bytes": device.total_memory,
        **{name: version(name) for name in ("torch", "triton", "transformers")},
        "copy_bytes_per_s": copy_bandwidth()(),
        "product_flops": matrix_peak()(),
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU on this machine")
    Path(sys.argv[1]).write_text(json.dumps(ceilings()))
