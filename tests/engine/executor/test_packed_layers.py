"""Packed layers in files that all workers of a host map."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.executor.models.linear import IN_C, QUANTIZED, TORCH, Linear, Part, Products
from baton.engine.executor.models.packed.packed_folder import LEAST_BYTES, SharedLayers
from baton.engine.executor.models.quantized.quantized_tensor import QuantizedTensor, held
from baton.sampling import SamplingParams
from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.quantized_weight import QuantizedWeight, quantize
from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import load, tokens
from tests.support.engine.prompts import awkward_prompts
from tests.support.gguf.caches import own_cache
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # a C compiler

ROOM = 2**20
NUM_INPUTS = 64


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_codes(codes: QuantizedWeight) -> torch.Tensor:
    return QuantizedTensor(held(codes), torch.bfloat16)


def with_minima(bits: int) -> QuantizedWeight:
    made = quantize(random(40, NUM_INPUTS), bits, 32)
    return QuantizedWeight(made.codes, made.scales, -made.scales, made.codebook)


FLOAT8 = QuantizedWeight(random(40, NUM_INPUTS).to(torch.float8_e4m3fn), random(40, 2).abs())
LAYERS: dict[str, list[Part]] = {
    "float32": [(random(40, NUM_INPUTS), random(40))],
    "float32 that is bfloat16": [(random(40, NUM_INPUTS).bfloat16().float(), None)],
    "bfloat16, two parts": [
        (random(40, NUM_INPUTS).bfloat16(), random(40).bfloat16()),
        (random(17, NUM_INPUTS).bfloat16(), None),
    ],
    "8 bits": [(in_codes(with_minima(8)), None)],
    "4 bits": [(in_codes(with_minima(4)), random(40).bfloat16())],
    "float8": [(in_codes(FLOAT8), None)],
    "codes of two kinds": [(in_codes(with_minima(4)), None), (in_codes(FLOAT8), None)],
}


class Model:
    """A head and layers, and how often their weights were read."""

    def __init__(self, layers: Sequence[Sequence[Part]]) -> None:
        self.layers = layers
        self.num_reads = 0

    def build(self, products: Products) -> list[Linear]:
        def read(parts: Sequence[Part]) -> Sequence[Part]:
            self.num_reads += 1
            return parts

        head, *others = self.layers
        return [
            products.head(partial(read, head)),
            *(products.layer(partial(read, parts)) for parts in others),
        ]


def shared(folder: Path, weights: bytes = b"w", **settings: Any) -> SharedLayers:
    return SharedLayers(folder, weights, **{"num_bytes": 4096, "max_bytes": ROOM, **settings})


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock")


@pytest.mark.parametrize("kind", LAYERS)
def test_mapped_layers_compute_what_packed_ones_do(kind: str, tmp_path: Path) -> None:
    model = Model([LAYERS[kind], *LAYERS.values()])
    own = model.build(IN_C)
    for num_reads in (len(own), 0):
        model.num_reads = 0
        mapped = model.build(shared(tmp_path).over(IN_C, model.build))
        assert model.num_reads == num_reads
        x = random(5, NUM_INPUTS).to(LAYERS[kind][0][0].dtype)
        assert torch.equal(mapped[0](x), own[0](x))
    indices = torch.tensor([3, 16, 39])
    if isinstance(mapped[0], PackedLinear) and isinstance(own[0], PackedLinear):
        assert torch.equal(mapped[0].rows_of_weight(indices), own[0].rows_of_weight(indices))
    assert len(files_in(tmp_path)) == 1


def test_files_are_by_weights_and_products(tmp_path: Path) -> None:
    model = Model([[(random(40, NUM_INPUTS), None)]])
    for weights in (b"1", b"2", b"1"):
        for products in (IN_C, *QUANTIZED.values(), IN_C):
            made = model.build(shared(tmp_path, weights).over(products, model.build))
            assert torch.equal(
                made[0](random(2, NUM_INPUTS)),
                model.build(products)[0](random(2, NUM_INPUTS)),
            )
    assert len(files_in(tmp_path)) == 6


def test_least_recently_used_file_is_removed(tmp_path: Path) -> None:
    model = Model([[(random(64, 64), None)]])
    shared(tmp_path, b"1").over(IN_C, model.build)
    (first,) = tmp_path.glob("*.weights")
    size = first.stat().st_size
    bounds = {"num_bytes": size, "max_bytes": 2 * size}
    shared(tmp_path, b"2", **bounds).over(IN_C, model.build)
    (second,) = set(tmp_path.glob("*.weights")) - {first}
    for file, nanoseconds in ((first, 1), (second, 2)):
        os.utime(file, ns=(nanoseconds, nanoseconds))
    shared(tmp_path, b"1", **bounds).over(IN_C, model.build)  # uses the first
    shared(tmp_path, b"3", **bounds).over(IN_C, model.build)
    assert (first.exists(), second.exists(), len(files_in(tmp_path))) == (True, False, 2)


@pytest.mark.parametrize(
    ("settings", "products", "why"),
    [
        ({"num_bytes": ROOM + 1}, IN_C, r"are more than packed_weights_bytes \(1,048,576\)"),
        ({"num_bytes": 2**60, "max_bytes": 2**61}, IN_C, "bytes free, too few"),
        ({}, TORCH, "a TorchLinear has a form of its own"),
    ],
)
def test_worker_packs_for_itself_where_no_file_can_be(
    settings: dict[str, Any],
    products: Products,
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model([[(random(40, NUM_INPUTS), None)]])
    with caplog.at_level(logging.INFO):
        made = model.build(shared(tmp_path, **settings).over(products, model.build))
    x = random(2, NUM_INPUTS)
    assert torch.equal(made[0](x), model.build(products)[0](x))
    assert files_in(tmp_path) == []
    (line,) = [each for each in caplog.messages if "for itself alone" in each]
    assert re.search(why, line)


def test_worker_packs_for_itself_in_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Model([[(random(40, NUM_INPUTS), None)]])
    assert shared(tmp_path / "file").over(IN_C, model.build) is IN_C


@pytest.mark.parametrize("left", [b"", b"half of it" * 100])
def test_file_that_is_not_whole_is_written_again(left: bytes, tmp_path: Path) -> None:
    model = Model([[(random(40, NUM_INPUTS), None)]])
    shared(tmp_path).over(IN_C, model.build)
    (file,) = tmp_path.glob("*.weights")
    whole = file.read_bytes()
    file.write_bytes(left)
    file.with_suffix(".part").write_bytes(left)
    shared(tmp_path).over(IN_C, model.build)
    assert file.read_bytes() == whole
    assert files_in(tmp_path) == [file.name]


def test_failed_build_leaves_no_file(tmp_path: Path) -> None:
    def build(_products: Products) -> NoReturn:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        shared(tmp_path).over(IN_C, build)
    assert files_in(tmp_path) == []


HOLDING = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("holds", flush=True)
input()
"""


def test_worker_waits_for_one_that_packs_until_that_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model([[(random(40, NUM_INPUTS), None)]])
    shared(tmp_path).over(IN_C, model.build)
    (file,) = tmp_path.glob("*.weights")
    file.unlink()
    model.num_reads = 0
    command = [sys.executable, "-c", HOLDING, str(file.with_suffix(".lock"))]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
        ThreadPoolExecutor(1) as threads,
        caplog.at_level(logging.INFO),
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"holds\n"
            made = threads.submit(shared(tmp_path).over, IN_C, model.build)
            wait_until(lambda: "waiting for the worker that packs these weights" in caplog.messages)
            assert (made.done(), model.num_reads) == (False, 0)
        finally:
            holder.kill()
        made.result(timeout=30)
    assert model.num_reads == 1
    assert file.exists()


def test_engine_maps_the_file_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal tokens, and without the checkpoint's own file."""
    cache = own_cache(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config = small_config(
        "Qwen3Config", vocab_size=LEAST_BYTES // 64 // 4, tie_word_embeddings=True
    )
    config.hidden_size = 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    expected = None
    for keeps in (0, ROOM * 2**10, ROOM * 2**10):
        engine = load(str(tmp_path / "model"), packed_weights_bytes=keeps)
        found = tokens(engine.generate(awkward_prompts(), SamplingParams(max_tokens=8)))
        expected = expected or found
        assert found == expected
        mapped = Path("/proc/self/maps").read_text()
        assert (str(cache / "baton" / "weights") in mapped) is bool(keeps)
        assert str(tmp_path / "model") not in mapped
        del engine
