"""Memory that a worker process takes for its libraries."""

import subprocess
import sys

import pytest
import torch

# Products of 700 shapes, in a process whose caches are empty; prints the MiB that they keep.
_PRODUCTS = """
import ctypes
from baton.worker.memory import bound_primitive_caches

bound_primitive_caches()
import torch
from baton.engine.executor.models.linear import TorchLinear

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

def heap_mib():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    return mallinfo().h / 2**20

torch.set_num_threads(1)
product = TorchLinear(torch.zeros(512, 256))
product(torch.zeros(1, 256))
before = heap_mib()
for num_rows in range(2, 702):
    product(torch.zeros(num_rows, 256))
print(heap_mib() - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")
@pytest.mark.skipif(sys.platform != "linux", reason="the heap is measured by glibc")
def test_products_of_ever_new_shapes_keep_bounded_memory():
    command = [sys.executable, "-c", _PRODUCTS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(result.stdout) < 200.0
