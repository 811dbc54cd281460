"""Limits of memory that cannot hold the named model, or what a worker holds beside it."""

import helm_python as helm
import pytest

from tests.support.rendered_chart import render

GIB = 2**30


def values(name, *, memory="3Gi", gpus=0, settings=None, **model):
    resources = {"requests": {"memory": "1Gi"}, "limits": {"memory": memory}}
    worker = {"gpus": gpus, "settings": settings or {}, "resources": resources}
    return {"model": {"source": "hub", "name": name, **model}, "prefill": worker, "decode": worker}


REFUSED = {
    "16 bits": (values("Qwen/Qwen3-8B"), r"weights of Qwen/Qwen3-8B \(13\.5Gi\)"),
    "experts": (values("Qwen/Qwen3-30B-A3B", memory="48Gi"), r"\(50\.3Gi\)"),
    "small letters": (values("google/gemma-2-9b-it"), r"\(15\.1Gi\)"),
    "a length in the name": (values("Qwen/Qwen2.5-7B-Instruct-1M"), r"\(11\.8Gi\)"),
    "32 bits": (values("Qwen/Qwen3-1.7B", memory="6Gi", dtype="float32"), r"\(5\.7Gi\)"),
    "8 bits": (values("Qwen/Qwen3-8B", settings={"quantization": "int8"}), r"\(6\.8Gi\)"),
    "4 bits": (values("Qwen/Qwen3-8B", settings={"quantization": "int4"}), r"\(3\.4Gi\)"),
    "4 bits of the checkpoint": (values("Qwen/Qwen3-14B-AWQ"), r"\(5\.9Gi\)"),
    "4 bits unpacked for a GPU": (values("Qwen/Qwen3-8B-AWQ", gpus=1), r"\(13\.5Gi\)"),
    "a size": (values("org/model", weightsSize="4Gi"), r"weights of org/model \(4\.0Gi\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_chart_refuses_memory_that_cannot_hold_weights(case):
    given, reason = REFUSED[case]
    with pytest.raises(helm.HelmError, match=reason) as caught:
        render(given)
    assert "prefill.resources.limits.memory: " in str(caught.value)
    assert "or set model.weightsSize if the weights take less" in str(caught.value)


ACCEPTED = {
    "enough": values("Qwen/Qwen3-8B", memory="16Gi"),
    "a small model": values("Qwen/Qwen3-0.6B"),
    "millions": values("HuggingFaceTB/SmolLM2-135M-Instruct"),
    "no size in the name": values("org/model"),
    "several experts in the name": values("mistralai/Mixtral-8x7B-v0.1"),
    "a GPU, whose worker maps the files": values("Qwen/Qwen3-8B", gpus=1),
    "a size that is less than the name says": values("Qwen/Qwen3-8B", weightsSize="1Gi"),
    "a folder of a volume": values("qwen3-8b", source="claim", claim="checkpoints"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_chart_accepts_memory_that_may_hold_weights(case):
    assert render(ACCEPTED[case])


def test_encoder_alone_needs_no_memory_for_the_model():
    hub = {"source": "hub", "name": "Qwen/Qwen2.5-VL-7B-Instruct"}
    encode = {"replicas": 1, "settings": {"encoder_only": True}}
    gpus = {"gpus": 1}
    assert render({"model": hub, "prefill": gpus, "decode": gpus, "encode": encode})
    with pytest.raises(helm.HelmError, match=r"encode\.resources\.limits\.memory"):
        render({"model": hub, "prefill": gpus, "decode": gpus, "encode": {"replicas": 1}})


@pytest.mark.parametrize("gpus", [0, 1])
def test_chart_says_what_a_worker_holds_beside_weights(gpus):
    worker = {"gpus": gpus, "settings": {"swap_bytes": 3 * GIB}}
    with pytest.raises(helm.HelmError) as caught:
        render({"decode": worker})
    pool = "" if gpus else "kvCacheSize (512Mi of shared memory), "
    needed, remedy = ("4.0Gi", "") if gpus else ("4.5Gi", "; the weights come on top")
    assert (
        f"3Gi does not hold {pool}settings.swap_bytes (3.0Gi) and 1Gi of its process; expected "
        f"{needed} at least. Raise it{remedy}"
    ) in str(caught.value)
