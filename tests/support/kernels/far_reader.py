"""Process of `test_engine_process`: prints the SHA-256 of GPU memory that it opens by handle.

python -m tests.support.kernels.far_reader HANDLE OFFSET NUM_BYTES DEVICE
"""

import hashlib
import sys

import torch

from baton.engine.executor.cache.cuda_ipc import CudaDriver, IpcPlace, MappedMemory


def main(handle: str, offset: str, num_bytes: str, device: str) -> None:
    place = IpcPlace(bytes.fromhex(handle), int(offset))
    mapped = MappedMemory(place, int(num_bytes), torch.device(device), CudaDriver())
    print(hashlib.sha256(mapped.content.cpu().numpy().tobytes()).hexdigest())
    mapped.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
