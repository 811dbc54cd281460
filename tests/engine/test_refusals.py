"""Refusals of models at load and of requests, each with its reason."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from baton.engine.config import EngineConfig
from baton.engine.executor.attention.interface import LayerAttention
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.backend import choose_backend
from baton.engine.executor.cache.kv_layout import KvShape
from baton.engine.executor.models.transformers_model import ProbedLayer
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, Purpose
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    EngineLimitError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from baton.models.quantization import METHODS, NEAREST
from baton.models.support import check_config, check_model
from baton.sampling import SamplingParams
from tests.engine.conftest import Checkpoints
from tests.support.engine.checkpoints import FAMILIES, MAX_LEN, VOCAB_SIZE
from tests.support.engine.damages import DAMAGES, Damage
from tests.support.engine.prompts import random_prompt


def load(path: Path | str, **changes: object) -> LLM:
    return LLM.from_pretrained(path, EngineConfig(**{"device": "cpu", "num_blocks": 8, **changes}))  # type: ignore[arg-type]


def small(class_name: str, **changes: Any) -> PretrainedConfig:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config: PretrainedConfig = getattr(transformers, class_name)(**{**sizes, **changes})
    return config


def save(config: PretrainedConfig, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def save_t5(folder: Path) -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def save_bert(folder: Path) -> None:
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.CLIPVisionModel(config).save_pretrained(folder)


def of(class_name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: save(small(class_name, **changes), folder) and None


HYBRID = ["linear_attention", "full_attention"]
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

UNSERVABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "encoder-decoder": (save_t5, "encoder-decoder"),
    "not a language model": (save_bert, "not a causal language model"),
    "state-space": (
        of("MambaConfig", state_size=4, num_attention_heads=None), "no attention heads",
    ),
    "dynamic rope": (
        of("LlamaConfig", rope_parameters={
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
        }),
        "'dynamic' rotary embeddings",
    ),
    "long rope": (
        of("Phi3Config", rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
            **_FACTORS,
        }),
        "'longrope' rotary embeddings",
    ),
    "linear attention": (
        of("Qwen3NextConfig", head_dim=8, layer_types=HYBRID, linear_num_key_heads=2,
           linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
           num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
           shared_expert_intermediate_size=16),
        r"layers \[0\]",
    ),
    "attention of its own": (
        of("BloomConfig", n_head=4, n_layer=2),
        r"BloomForCausalLM cannot run .* \(it computes with the attention mask\)",
    ),
    "list of attentions of its own": (
        of("FalconConfig"), "FalconConfig: the model picks its attention from a list of its own",
    ),
    "two attentions in a layer": (of("DiffLlamaConfig"), "DiffLlama.* attends twice"),
    "state space beside attention": (
        of("FalconH1Config", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
        "other logits behind another sequence",
    ),
    "logits of all tokens": (
        of("WhisperConfig", d_model=32, decoder_layers=2, decoder_attention_heads=4,
           decoder_ffn_dim=48, max_target_positions=64, decoder_start_token_id=1),
        "WhisperForCausalLM computes logits of all tokens only",
    ),
    "attention in chunks": (
        of("Llama4TextConfig", head_dim=8, attention_chunk_size=16, intermediate_size_mlp=48,
           num_local_experts=2, moe_layers=[], no_rope_layers=[1, 1]),
        "neither causal nor a causal sliding window",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVABLE)
def test_engine_rejects_an_unservable_model_by_name(name: str, tmp_path: Path) -> None:
    make, why = UNSERVABLE[name]
    make(tmp_path)
    with pytest.raises(UnsupportedModelError, match=why) as refusal:
        load(tmp_path, max_model_len=60)
    assert len(str(refusal.value)) > 30, "not a sentence"


def test_engine_takes_embeddings_by_the_name_of_the_head(tmp_path: Path) -> None:
    """As of checkpoints whose two names of one weight were made one by another program."""
    save(small("LlamaConfig", tie_word_embeddings=True), tmp_path)
    weights = load_file(file := tmp_path / "model.safetensors")
    expected = load(tmp_path, max_model_len=60).generate([[5, 6, 7]])
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, file, {"format": "pt"})
    found = load(tmp_path, max_model_len=60).generate([[5, 6, 7]])
    assert found[0].token_ids == expected[0].token_ids


def test_engine_knows_the_model_that_ships() -> None:
    assert load("tiny").core.facts.info.name == "tiny"


def test_engine_rejects_a_checkpoint_without_safetensors_unread(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load(tmp_path)


def test_engine_rejects_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"folder .*nowhere' does not exist"):
        load(tmp_path / "nowhere")


def quantized(method: str) -> dict[str, object]:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


_OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}

DESCRIBED: dict[str, tuple[dict[str, object], str]] = {
    **{
        method: (
            quantized(method),
            f"quantized by {method}, which Baton does not read; it reads fp8, .*: give a",
        )
        for method in ("aqlm", "hqq", "torchao", "quanto", "bitnet", "vptq", "quark")
    },
    **{
        f"{method} as {variant}": (
            {"quantization_config": {"quant_method": method, key: variant}},
            f"quantized by {method} in the arrangement '{variant}', which Baton does not read",
        )
        for method, key, variant in (
            ("gptq", "checkpoint_format", "marlin"),
            ("awq", "version", "gemv"),
            ("compressed-tensors", "format", "marlin-24"),
            ("modelopt", "quant_algo", "w4a8_awq"),
        )
    },
    "rotated": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R1": {}}},
            }
        },
        "quantized by compressed-tensors with a transform_config, which Baton does not read",
    ),
    "sparse": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-bitmask"},
            }
        },
        "quantized by compressed-tensors with a sparsity_config, which Baton does not read",
    ),
    "quantized in part": ({"text_config": quantized("aqlm")}, "quantized by aqlm"),
    "quantized otherwise": ({"quantization_config": {"bits": 4}}, "by an unnamed method"),
    "encoder-decoder": (
        {"model_type": "t5", "is_encoder_decoder": True},
        "encoder-decoder model; Baton serves decoder-only models: choose a causal",
    ),
    "custom code": (
        {"model_type": "own", "auto_map": _OWN},
        r"needs code of its checkpoint \(own.OwnConfig, own.OwnModel\), which Baton never runs",
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_model_is_refused_alike_before_and_at_its_load(name: str, tmp_path: Path) -> None:
    changes, why = DESCRIBED[name]
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match=why) as before:
        check_model(str(tmp_path))
    with pytest.raises(UnsupportedModelError) as at_load:
        load(tmp_path)
    assert str(before.value) == str(at_load.value)


# Files of bitsandbytes name it without its bits.
READ = {*METHODS, "bitsandbytes_4bit", "bitsandbytes_8bit"}
REFUSED = {*AUTO_QUANTIZATION_CONFIG_MAPPING, *NEAREST, "unheard-of"} - READ


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_are_read_are_not_refused(method: str) -> None:
    check_config(quantized(method))


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_refused_quantization_names_the_nearest_that_is_read(method: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        check_config(quantized(method))
    assert f"quantized by {method}, which Baton does not read" in str(refusal.value)
    assert set(nearest(refusal.value)) <= set(METHODS)
    assert method in NEAREST or method in ("gguf", "unheard-of")


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("gptq", "checkpoint_format"),
        ("awq", "version"),
        ("auto-round", "packing_format"),
        ("compressed-tensors", "format"),
        ("modelopt", "quant_algo"),
    ],
)
def test_refused_arrangement_names_those_that_are_read(method: str, key: str) -> None:
    def check(arrangement: str) -> None:
        check_config({"quantization_config": {"quant_method": method, key: arrangement}})

    with pytest.raises(UnsupportedModelError) as refusal:
        check("unheard-of")
    first, *others = nearest(refusal.value)
    for arrangement in (first.removeprefix(f"{method} as "), *others):
        check(arrangement)


def nearest(refusal: UnsupportedModelError) -> list[str]:
    found = re.search("give a checkpoint of it by (.*), or the original one$", str(refusal))
    assert found is not None
    return re.split(", | or ", found[1])


def test_model_that_ships_passes_the_check_before_its_load() -> None:
    check_model("tiny")


def test_engine_rejects_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(UnsupportedModelError, match=r"config\.json' is not JSON"):
        load(tmp_path)


def test_engine_rejects_a_configuration_of_wrong_types(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": "many"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match="cannot read a model configuration"):
        load(tmp_path)


def test_engine_rejects_an_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match="unheard_of"):
        load(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_engine_rejects_wrong_weights_by_name(damage: Damage, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    check_model(str(tmp_path))
    damage.change(tmp_path)
    with pytest.raises(UnsupportedModelError, match=damage.sentence) as at_load:
        load(tmp_path)
    with pytest.raises(UnsupportedModelError) if damage.is_told else nullcontext() as before:
        check_model(str(tmp_path))
    assert before is None or str(before.value) == str(at_load.value)


@pytest.mark.parametrize("name", ["weight missing", "another shape"])
@pytest.mark.parametrize("family", ["mistral_long", "qwen2", "qwen3", "gemma3", "mixtral"])
def test_weights_of_every_family_are_rejected_by_name(
    family: str, name: str, tmp_path: Path
) -> None:
    """Before a load where the family is a common one."""
    save(FAMILIES[family](), tmp_path)
    check_model(str(tmp_path))
    DAMAGES[name].change(tmp_path)
    with pytest.raises(UnsupportedModelError, match=DAMAGES[name].sentence):
        load(tmp_path)
    is_common = family not in ("gemma3", "mixtral")
    with pytest.raises(UnsupportedModelError) if is_common else nullcontext():
        check_model(str(tmp_path))


@pytest.mark.parametrize("model_type", ["unheard_of", "llama"])
def test_engine_never_runs_code_of_a_checkpoint(model_type: str, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    marker = tmp_path / "it ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (tmp_path / "evil.py").write_text(code + "class Config: pass\nclass Model: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = model_type
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        load(tmp_path)
    except UnsupportedModelError:
        assert model_type == "unheard_of"
    assert not marker.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_engine_rejects_cuda_without_a_gpu(checkpoints: Checkpoints, device: str) -> None:
    with pytest.raises(InvalidArgumentError, match="torch sees no GPU"):
        load(checkpoints["llama"], device=device)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kernels": "triton"}, "kernels: is 'triton', which needs Triton's kernels; they run on"),
        ({"deterministic": True}, "deterministic: is True, which needs Triton's kernels; they run"),
        ({"kernels": "torch", "deterministic": True}, "deterministic: is set, which needs kernels"),
    ],
)
def test_engine_refuses_kernels_that_cannot_run_on_a_cpu(
    checkpoints: Checkpoints, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        load(checkpoints["llama"], **changes)


def test_backend_refuses_head_size_that_kernels_do_not_have() -> None:
    layer = ProbedLayer(KvShape(2, 10, 10), num_heads=2, attention=LayerAttention(1.0, MaskRule()))
    config = EngineConfig(device="cuda", kernels="triton")
    with pytest.raises(InvalidArgumentError, match=r"a head size of .* has no attention kernel"):
        choose_backend(config, nn.Module(), [layer], 16, torch.device("cuda", 0))  # type: ignore[arg-type]


def test_engine_rejects_an_unknown_device(checkpoints: Checkpoints) -> None:
    with pytest.raises(InvalidArgumentError, match="device"):
        load(checkpoints["llama"], device="abacus")


def test_engine_rejects_a_length_beyond_the_model(checkpoints: Checkpoints) -> None:
    assert (
        load(checkpoints["llama"], max_model_len=MAX_LEN).core.facts.info.max_model_len == MAX_LEN
    )
    with pytest.raises(InvalidArgumentError, match=f"was made for {MAX_LEN}"):
        load(checkpoints["llama"], max_model_len=MAX_LEN + 1)


def test_engine_rejects_a_cache_below_one_block(checkpoints: Checkpoints) -> None:
    with pytest.raises(InvalidArgumentError, match="one block of each cache group takes"):
        load(checkpoints["llama"], num_blocks=None, kv_cache_bytes=100)


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 2**40}, {"num_blocks": None, "kv_cache_bytes": 2**50}]
)
def test_engine_rejects_a_cache_beyond_the_memory(
    checkpoints: Checkpoints, changes: dict[str, Any]
) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"asks for \d+ MiB for KV .* set less"
    ) as refusal:
        load(checkpoints["llama"], **changes)
    assert refusal.value.field in changes


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"max_num_seqs": -1},
        {"max_model_len": 0},
        {"num_threads": 0},
        {"dtype": "int8"},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4},
        {"max_num_batched_tokens": 0},
        {"max_num_tokens_with_decodes": 3, "max_num_seqs": 4},
        {"max_num_tokens_with_decodes": 9, "max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"kv_cache_bytes": 0},
        {"policy": "loudest first"},
        {"preemption": "never"},
        {"swap_bytes": -1},
        {"max_drafts": -1},
        {"free_block_margin": -0.1},
        {"free_block_margin": 1.0},
        {"max_cache_reads": 0},
        {"long_prefill_threshold": 0},
    ],
)
def test_engine_config_names_the_field_that_is_invalid(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        EngineConfig(**changes)
    assert refusal.value.field in changes


# Requests.

WHAT_IS_WRONG: dict[str, tuple[tuple[int, ...], SamplingParams, int, type[BatonError], str]] = {
    "no prompt": ((), SamplingParams(), 0, InvalidArgumentError, "token_ids"),
    "a token too large": (
        (1, VOCAB_SIZE), SamplingParams(), 2, InvalidArgumentError, r"token_ids\[1\]",
    ),
    "a negative token": ((-1,), SamplingParams(), 1, InvalidArgumentError, r"token_ids\[0\]"),
    "too long together": (
        (1,) * 250, SamplingParams(max_tokens=7), 250, InvalidArgumentError, "length is 256",
    ),
    "more prompt than tokens": (
        (1, 2), SamplingParams(), 3, InvalidArgumentError, "num_prompt_tokens",
    ),
    "no prompt among the tokens": ((1, 2), SamplingParams(), 0, InvalidArgumentError, "num_prompt"),
    "nothing left to do": (
        (1, 2, 3), SamplingParams(max_tokens=2), 1, InvalidArgumentError, "already reached",
    ),
    "more blocks than there are": (
        (1,) * 100, SamplingParams(max_tokens=50), 100, EngineLimitError, "need 160 tokens of KV",
    ),
}  # fmt: skip


SEVERAL = {"temperature": 1.0, "n": 3}
WHAT_IS_WRONG |= {
    "more sequences than slots": (
        (1,), SamplingParams(temperature=1.0, n=5), 1, InvalidArgumentError,
        r"sampling\.n: asks for 5 sequences; this engine runs 4 ",
    ),
    "more candidates than slots": (
        (1,), SamplingParams(temperature=1.0, best_of=5), 1, InvalidArgumentError,
        r"sampling\.best_of: asks for 5 sequences; this engine runs 4 ",
    ),
    "more beams than slots": (
        (1,), SamplingParams(beam_width=5), 1, InvalidArgumentError,
        r"sampling\.beam_width: asks for 5 sequences; this engine runs 4 ",
    ),
    "several that have begun": (
        (1, 2), SamplingParams(**SEVERAL), 1, InvalidArgumentError,
        "num_prompt_tokens: is 1 of 2 tokens; must be all where several",
    ),
    "beams that have begun": (
        (1, 2), SamplingParams(beam_width=2), 1, InvalidArgumentError,
        "num_prompt_tokens: is 1 of 2 tokens; must be all where several",
    ),
    "beams that do not fit together": (
        (1,) * 20, SamplingParams(beam_width=4, max_tokens=30), 20, EngineLimitError,
        "need 256 tokens of KV, in blocks of 16; the KV pool has room for 128",
    ),
    "a bias on no token": (
        (1,), SamplingParams(logit_bias=((3, 1.0), (VOCAB_SIZE, 1.0))), 1, InvalidArgumentError,
        r"sampling\.logit_bias: has the token ids 512",
    ),
    "a ban of no token": (
        (1,), SamplingParams(bad_token_ids=((3,), (1, VOCAB_SIZE))), 1, InvalidArgumentError,
        r"sampling\.bad_token_ids\[1\]\[1\]: is 512",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHAT_IS_WRONG)
def test_add_request_rejects_an_unservable_request(checkpoints: Checkpoints, name: str) -> None:
    token_ids, params, num_prompt, error, why = WHAT_IS_WRONG[name]
    engine = load(checkpoints["llama"], max_num_seqs=4)
    with pytest.raises(error, match=why):
        engine.core.add(EngineRequest("x", token_ids, params, num_prompt))
    assert not engine.core.has_work
    assert engine.generate([(1, 2, 3)])[0].token_ids


def test_engine_serves_a_request_that_fills_model_and_pool(
    checkpoints: Checkpoints,
) -> None:
    engine = load(checkpoints["llama"], num_blocks=MAX_LEN // 16)
    (result,) = engine.generate([random_prompt(MAX_LEN - 20)], SamplingParams(max_tokens=20))
    assert len(result.token_ids) == 20


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(33, 1), (20, 20)])
def test_engine_names_room_of_pool_that_request_exceeds(
    checkpoints: Checkpoints, num_prompt: int, max_tokens: int
) -> None:
    """A prompt that is longer than the pool, and one that is so with its output."""
    engine = load(checkpoints["llama"], num_blocks=2)
    named = "need 48 tokens of KV, .* has room for 32. .* by --kv-cache-bytes or --num-blocks"
    with pytest.raises(EngineLimitError, match=named):
        engine.generate([random_prompt(num_prompt)], SamplingParams(max_tokens=max_tokens))


def test_prefill_needs_blocks_for_its_prompt_only(checkpoints: Checkpoints) -> None:
    engine = load(checkpoints["llama"], num_blocks=2)
    prompt, params = random_prompt(32), SamplingParams(max_tokens=100)
    with pytest.raises(InvalidArgumentError, match="the KV pool has room for 32"):
        engine.core.add(EngineRequest("x", prompt, params, 32))
    engine.core.add(EngineRequest("x", prompt, params, 32, Purpose.PREFILL))
    (update,) = engine.core.step().updates
    assert update.token_id is not None
    (table,) = update.block_ids
    assert len(table) == 2


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0, n=16), SamplingParams(beam_width=16)]
)
def test_prefill_is_one_sequence_for_any_n_or_beam_width(
    checkpoints: Checkpoints, params: SamplingParams
) -> None:
    engine = load(checkpoints["llama"], num_blocks=2, max_num_seqs=1)
    request = EngineRequest("x", random_prompt(32), params, 32, Purpose.PREFILL)
    engine.core.add(request)
    (update,) = engine.core.step().updates
    assert update.token_id is not None
    assert update.finish_reason is not None
    assert engine.core.scheduler.stats().num_kept == 1


def test_sequences_beyond_the_pool_run_one_after_the_other(
    checkpoints: Checkpoints,
) -> None:
    """Unlike beams, of which the step after needs all."""
    engine = load(checkpoints["llama"], num_blocks=4, max_num_seqs=4)
    params = SamplingParams(max_tokens=30, **{**SEVERAL, "n": 4}, ignore_eos=True)
    (result,) = engine.generate([random_prompt(34)], params)
    assert [len(c.token_ids) for c in result.completions] == [30] * 4
    assert engine.core.scheduler.stats().num_preemptions > 0


def test_add_request_rejects_a_duplicate_id(checkpoints: Checkpoints) -> None:
    engine = load(checkpoints["llama"])
    request = EngineRequest("x", (1, 2), SamplingParams(), 2)
    engine.core.add(request)
    with pytest.raises(AlreadyExistsError):
        engine.core.add(request)
    engine.core.scheduler.abort("x")
    engine.core.add(request)
    engine.core.scheduler.abort("x")
    engine.core.step()
    assert not engine.core.has_work


def test_generate_adds_no_request_when_one_prompt_is_invalid(checkpoints: Checkpoints) -> None:
    engine = load(checkpoints["llama"])
    with pytest.raises(InvalidArgumentError):
        engine.generate([(1, 2), (3,), (VOCAB_SIZE,)])
    assert not engine.core.has_work
    assert engine.core.scheduler.stats().num_held_blocks == 0
    with pytest.raises(InvalidArgumentError, match="2 entries for 1 prompts"):
        engine.generate([(1,)], [SamplingParams()] * 2)
