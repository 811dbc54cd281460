"""Ceilings of the GPU of this machine: what its memory and its arithmetic give at best.

python -m bench.gpu.ceilings FILE
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.gpu.sizes import SIZES, Sizes
from bench.gpu.timing import Bench, CudaDevice, Device
from bench.report import NotPossibleError


def ceilings(bench: Bench) -> dict[str, Any]:
    """Returns the device's and the libraries' names, bytes copied per second (read and written) and
    operations per second of a bf16 product."""
    device = bench.device.properties
    return {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_bytes": device.total_memory,
        **{name: version(name) for name in ("torch", "triton", "transformers")},
        "copy_bytes_per_s": bench.copy_bandwidth()(),
        "product_flops": bench.matrix_peak()(),
    }


def main(file: Path, make_device: Callable[[], Device] = CudaDevice, sizes: Sizes = SIZES) -> None:
    try:
        bench = Bench(make_device(), sizes, repeats=1)
    except NotPossibleError as error:
        raise SystemExit(str(error)) from error
    file.write_text(json.dumps(ceilings(bench)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
