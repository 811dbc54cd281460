"""Weights that stay in codes: which do, what their numbers are, and what engines do with them."""

import gc
from pathlib import Path

import pytest
import torch

from baton.engine.core import assembly
from baton.engine.executor.models import loader
from baton.engine.executor.models.linear import linear_in_c, merged_layer
from baton.engine.executor.models.quantized.gguf_codes import CODED_TYPES
from baton.engine.executor.models.quantized.quantized_tensor import QuantizedTensor, held, rows_of
from baton.engine.executor.models.transformers_model import AttentionHook, probe
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder
from baton.sampling import SamplingParams
from baton_kernels.cpu.quantized_weight import QuantizedWeight, quantize
from baton_kernels.cpu.recording import Recording
from tests.support.engine.engines import config_of, load, mostly_slow, tokens
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts
from tests.support.engine.quantized.answers import assert_answers
from tests.support.engine.quantized.codes import in_codes, loaded
from tests.support.engine.quantized.formats import Packed, by_lanes
from tests.support.gguf.models import blocks_config, random_model, read_gguf
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf

pytestmark = pytest.mark.system  # a C compiler

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# By format, how much its values are rounded, relative to the largest of a group: half of the last
# place of the dtype of the scales; of bitsandbytes and scales in float32 nothing.
ROUNDED = {
    "gptq": 2**-11,
    "gptq of 8 bits": 2**-11,
    "awq": 2**-11,
    "auto-round": 2**-11,
    "w4a16": 2**-8,
    "w4a16 asymmetric": 2**-8,
    "w4 by channels": 2**-8,
    "w3 asymmetric": 2**-8,
    "w8a16": 2**-8,
    "w8a8": 2**-8,
    "w8 asymmetric": 2**-8,
    "fp8 in blocks": 0,
    "fp8 by channels": 2**-8,
    "mxfp8": 0,
    "nvfp4": 2**-8,
    "compressed mxfp4": 0,
    "modelopt fp8": 0,
    "modelopt nvfp4": 0,
    "nf4 doubly": 0,
    "int8": 2**-22,
}
QUICK = ("gptq", "awq", "w4a16", "w8a8", "fp8 in blocks", "modelopt nvfp4", "nf4 doubly", "int8")
LAYERS = 3 * 7  # of three decoder layers


@pytest.mark.parametrize("name", mostly_slow(ROUNDED, *QUICK))
def test_numbers_of_codes_are_the_values_unrounded(quantized: Packed, name: str) -> None:
    path, meant = quantized(name, "llama")
    ours, values = loaded(path), loaded(meant)
    assert len(in_codes(ours)) == LAYERS
    for weight, value in ((ours[name], values[name]) for name in values):
        largest = value.abs().max()
        assert (weight - value).abs().max() <= ROUNDED[name] * largest


@pytest.mark.parametrize("name", ["gptq in act-order", "fp8 in cut blocks"])
def test_formats_without_codes_become_plain(quantized: Packed, name: str) -> None:
    path, _ = quantized(name, "llama")
    assert not in_codes(loaded(path))


@pytest.mark.parametrize(
    "changes", [{"kernels": "torch"}, {"dtype": "float16"}], ids=["torch", "float16"]
)
def test_weights_become_plain_where_no_product_takes_codes(
    quantized: Packed, changes: dict
) -> None:
    path, _ = quantized("awq", "llama")
    assert not in_codes(loaded(path, **changes))


def test_models_of_other_families_become_plain(quantized: Packed) -> None:
    path, _ = quantized("awq", "gemma3")
    assert not in_codes(loaded(path))


@pytest.mark.parametrize("kind", by_lanes(CODED_TYPES, ["Q4_K"], ["Q8_0", "Q4_0", "Q6_K"]))
def test_gguf_in_codes_answers_as_transformers(kind: str, tmp_path: Path) -> None:
    file, oracle = str(tmp_path / "model.gguf"), Oracle(read_gguf)
    write_gguf(Path(file), random_model(blocks_config()), sentence_piece(), lambda _name: kind)
    folder = str(checkpoint_folder(file, (*DESCRIPTION, *WEIGHTS)))
    assert len(in_codes(loaded(folder))) >= 4 * 7  # the layers'; embeddings may be, too
    assert_answers(file, oracle, file, oracle.model(file).config.vocab_size)


def test_probe_reads_no_codes_of_gguf(tmp_path: Path) -> None:
    """Each layer's are read when it is packed, so that one is in memory at a time, and none where
    packed ones are in a file."""
    file = tmp_path / "model.gguf"
    write_gguf(file, random_model(blocks_config()), sentence_piece(), lambda _name: "Q4_K")
    path = str(checkpoint_folder(str(file), (*DESCRIPTION, *WEIGHTS)))
    config, settings = loader.load_config(path), config_of()
    hook = AttentionHook(loader.max_model_len(config, settings))
    model = loader.load_model(path, config, settings, hook.name)
    file.unlink()
    assert len(probe(model, hook)) == config.num_hidden_layers
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(FileNotFoundError):
        weight.clone()


@pytest.mark.parametrize("name", ["awq", "w8a8"])
def test_bfloat16_model_answers_in_codes(quantized: Packed, oracle: Oracle, name: str) -> None:
    """In bfloat16, so that of most tokens the first alone are those of float32."""
    path, numbers = quantized.with_codes(name, "llama")
    prompts = awkward_prompts()
    found = tokens(load(path, dtype="bfloat16").generate(prompts, GREEDY))
    expected = [oracle(numbers, prompt, NUM_TOKENS) for prompt in prompts]
    assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) > len(prompts) / 2


def test_workers_with_codes_and_plain_weights_pair(quantized: Packed) -> None:
    path, _ = quantized("awq", "llama")
    fingerprints = {
        load(path, kernels=kernels).core.facts.info.fingerprint for kernels in ("auto", "torch")
    }
    assert len(fingerprints) == 1


def of_codes(outputs: int, bits: int, group: int = 32) -> QuantizedTensor:
    return QuantizedTensor(held(quantize(torch.randn(outputs, 64), bits, group)), torch.float32)


@pytest.mark.parametrize(
    "kinds", [((8, 32), (8, 32)), ((8, 32), (4, 32)), ((4, 32), (4, 16))], ids=str
)
def test_merged_layers_of_codes_stand_beside_each_other(kinds: tuple) -> None:
    """Those of unlike codes or groups are multiplied alone."""
    parts = [of_codes(40, *kind) for kind in kinds]
    biases = [torch.randn(40), None]
    x = torch.randn(3, 64)
    layer = merged_layer(linear_in_c, list(zip(parts, biases, strict=True)))
    alone = [linear_in_c(w, b)(x) for w, b in zip(parts, biases, strict=True)]
    assert torch.equal(layer(x), torch.cat(alone, dim=1))
    with Recording() as calls:
        layer(x)
    assert calls.can_repeat
    residual = torch.randn(3, 80)
    assert torch.equal(layer.plus(x, residual), layer(x) + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_weights_stand_beside_codes(dtype: torch.dtype) -> None:
    coded = QuantizedTensor(held(quantize(torch.randn(40, 64), 4, 32)), dtype)
    plain, x = torch.randn(24, 64).to(dtype), torch.randn(3, 64).to(dtype)
    found = merged_layer(linear_in_c, [(coded, None), (plain, None)])(x)
    expected = torch.cat([x @ coded.quantized.numbers().to(dtype).T, x @ plain.T], dim=1)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-4)


def test_quantized_tensor_is_a_plain_weight_to_torch() -> None:
    weight = of_codes(40, 4)
    plain = weight.quantized.numbers()
    x, indices = torch.randn(3, 64), torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(torch.nn.functional.linear(x, weight), x @ plain.T)
    assert torch.equal(torch.nn.functional.embedding(indices, weight), plain[indices])
    assert torch.equal(rows_of(weight, indices[0]).clone(), plain[indices[0]])
    assert isinstance(torch.nn.Parameter(weight, requires_grad=False).detach(), QuantizedTensor)
    assert (weight.to("meta").shape, weight.to("meta").device.type) == (plain.shape, "meta")
    assert torch.equal(weight.to(torch.bfloat16), plain.bfloat16())


def live_codes() -> list[QuantizedWeight]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, QuantizedWeight)]


def test_model_in_codes_has_no_plain_weight(quantized: Packed) -> None:
    """Codes are in panels alone once it serves."""
    path, _ = quantized("awq", "llama")
    others = live_codes()  # of other tests
    model = assembly.load(path, config_of(), lambda _phase, _fraction: None)
    assert all(any(each is other for other in others) for each in live_codes())
    assert model.info.architecture == "LlamaForCausalLM"
