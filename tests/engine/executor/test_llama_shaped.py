"""Recognition of models for the fused modules, and the reasons given for others."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from baton.engine.executor.models.llama_shaped import is_dense, why_unknown
from tests.support.engine.checkpoints import FAMILIES


def model_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "dense"),
    [
        ("llama", True),
        ("mistral_short", True),
        ("qwen2", True),
        ("qwen3", True),
        ("mixtral", False),
        ("qwen3_moe", False),
        ("gpt_oss", False),
    ],
)
def test_why_unknown_accepts_llama_shaped_decoders(family, dense):
    model = model_of(FAMILIES[family]())
    assert why_unknown(model) is None
    assert is_dense(model) == dense


class Quantised(torch.nn.Module):
    """Stands for a product with weights of another form."""


def test_why_unknown_gives_the_reason_for_other_decoders():
    gpt2 = why_unknown(model_of(FAMILIES["gpt2"]()))
    assert gpt2 is not None
    assert "of GPT2LMHeadModel there is no form whose products do not depend on the batch" in gpt2
    assert gpt2.endswith("Mixtral, Qwen 3 MoE and gpt-oss")
    gelu = why_unknown(model_of(FAMILIES["llama_gelu"]()))
    assert gelu is not None
    assert "this LlamaForCausalLM has the activation 'gelu'" in gelu
    for family, place in (("llama", "self_attn.q_proj"), ("mixtral", "mlp.experts")):
        model = model_of(FAMILIES[family]())
        model.model.layers[1].set_submodule(place, Quantised())
        reason = why_unknown(model)
        assert reason is not None
        assert f"layer 1 of this {type(model).__name__} has a Quantised" in reason
        assert not is_dense(model)
