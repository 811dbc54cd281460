"""Encode pool of the chart: no object without it, and with it those of any other pool."""

import json

import pytest

from tests.support.rendered_chart import (
    component,
    container_of,
    found_in,
    of_kind,
    pod_of,
    render,
    workloads,
)

SCALED = {"autoscaling": {"prometheus": "http://prometheus:9090"}}


def kinds_of(objects, of):
    return sorted(one["kind"] for one in objects if component(one) == of)


def test_chart_deploys_no_encode_pool_by_default():
    objects = render({"monitoring": {"podMonitors": True}})
    assert kinds_of(objects, "prefill")
    assert not kinds_of(objects, "encode")


def test_encode_pool_has_the_objects_of_prefill_pool():
    values = {
        "tls": {"enabled": True, "certManager": {"issuer": "baton"}},
        "monitoring": {"podMonitors": True},
        "prefill": {"autoscaling": {"enabled": True}},
        "encode": {"autoscaling": {"enabled": True}},
        **SCALED,
    }
    objects = render(values)
    assert kinds_of(objects, "encode") == kinds_of(objects, "prefill")
    assert {"Deployment", "PodDisruptionBudget", "ScaledObject"} < set(kinds_of(objects, "encode"))


def test_encode_pods_differ_from_prefill_pods_only_in_command():
    found = workloads(render({"encode": {"replicas": 3}}))
    assert found["encode"]["spec"]["replicas"] == 3
    assert container_of(found["encode"])["args"] == ["baton", "encode-worker"]
    encode, prefill = (json.dumps(found[role]) for role in ("encode", "prefill"))
    assert encode.replace("encode", "prefill").replace('"replicas": 3', '"replicas": 1') == prefill


def test_encode_workers_prefer_nodes_near_prefill_workers():
    found = workloads(render({"kv": {"near": ["example.com/rack"]}, "encode": {"replicas": 1}}))
    (labels,) = found_in(pod_of(found["encode"])["affinity"]["podAffinity"], "matchLabels")
    assert labels["app.kubernetes.io/component"] == "prefill"


@pytest.mark.parametrize(("least", "activation"), [(0, "0.06"), (1, None)])
def test_encode_pool_scales_from_zero_only_where_allowed(least, activation):
    scaling = {"enabled": True, "minReplicas": least}
    pressure = {"autoscaling": {**SCALED["autoscaling"], "encodePressure": 0.6}}
    (scaler,) = of_kind(render({"encode": {"autoscaling": scaling}, **pressure}), "ScaledObject")
    metadata = scaler["spec"]["triggers"][0]["metadata"]
    assert scaler["spec"]["minReplicaCount"] == least
    assert (metadata["threshold"], metadata.get("activationThreshold")) == ("0.6", activation)
    assert ("cooldownPeriod" in scaler["spec"]) == (least == 0)


def test_only_encode_pool_may_scale_to_zero():
    scaling = {"autoscaling": {"enabled": True, "minReplicas": 0}}
    for role in ("prefill", "decode"):
        with pytest.raises(Exception, match=f"/{role}/autoscaling/minReplicas"):
            render({role: scaling, **SCALED})


def test_encode_pool_needs_its_certificate_only_where_deployed():
    secrets = {"router": "a", "prefill": "b", "decode": "c"}
    tls = {"tls": {"enabled": True, "existingSecrets": secrets}}
    render(tls)
    with pytest.raises(Exception, match=r"tls\.existingSecrets\.encode"):
        render({**tls, "encode": {"replicas": 1}})
