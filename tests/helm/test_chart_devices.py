"""Devices of workers: RDMA, GPUs, networks, locked and shared memory, and pairs near each other."""

import kubernetes_validate
import pytest
import yaml

from tests.support.rendered_chart import (
    WORKERS,
    container_of,
    env_of,
    found_in,
    of_kind,
    pod_of,
    render,
    workloads,
)

VERSION = "1.36"  # of Kubernetes


def decode_with(values, kv=None):
    """The Deployment of decode workers with these values of theirs, after schema validation."""
    objects = render({"decode": values, "kv": kv or {}})
    for found in objects:
        kubernetes_validate.validate(found, VERSION, strict=True)
    return workloads(objects)["decode"]


def annotations_of(workload):
    return workload["spec"]["template"]["metadata"].get("annotations", {})


def test_extra_resources_are_limits_beside_gpus():
    devices = {"gpus": 1, "extraResources": {"rdma/hca_shared_devices_a": 1}}
    limits = container_of(decode_with(devices))["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"]) == (1, 1)
    assert limits["memory"] == "3Gi"


def test_workers_get_runtime_class_and_capability_to_lock():
    workload = decode_with({"runtimeClassName": "nvidia", "ipcLock": True})
    assert pod_of(workload)["runtimeClassName"] == "nvidia"
    capabilities = container_of(workload)["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize(("size", "num_bytes"), [("1Gi", 2**30), ("unlimited", 2**64 - 1)])
def test_memlock_is_annotated_for_the_ulimit_adjuster(size, num_bytes):
    text = annotations_of(decode_with({"memlock": size}))[
        "ulimits.nri.containerd.io/container.worker"
    ]
    assert yaml.safe_load(text) == [
        {"type": "RLIMIT_MEMLOCK", "soft": num_bytes, "hard": num_bytes}
    ]


def test_multus_networks_are_annotated_beside_other_annotations():
    objects = render({"decode": {"networks": ["rdma/a", "b@net1"]}, "podAnnotations": {"x": "y"}})
    decode, prefill = (annotations_of(workloads(objects)[role]) for role in ("decode", "prefill"))
    assert decode == {"k8s.v1.cni.cncf.io/networks": "rdma/a,b@net1", "x": "y"}
    assert prefill == {"x": "y"}


def test_host_network_resolves_names_of_the_cluster():
    pod = pod_of(decode_with({"hostNetwork": True}))
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_shared_memory_is_mounted_and_counts_as_memory():
    workload = decode_with({"sharedMemory": "256Mi"})
    (volume,) = (v for v in pod_of(workload)["volumes"] if v["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    mounts = {m["name"]: m["mountPath"] for m in container_of(workload)["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"
    with pytest.raises(Exception, match="sharedMemory and 1Gi"):
        decode_with({"sharedMemory": "2Gi"})


def test_cuda_ipc_shares_ipc_namespace_of_the_node():
    worker = {"gpus": 1, "hostIPC": True}
    objects = render({"kv": {"connector": "cuda-ipc"}, "prefill": worker, "decode": worker})
    for role in WORKERS:
        assert pod_of(workloads(objects)[role])["hostIPC"] is True
        assert {"name": "BATON_KV_CONNECTOR", "value": "cuda-ipc"} in container_of(
            workloads(objects)[role]
        )["env"]


def test_pairs_prefer_nodes_near_each_other_nearest_first():
    keys = ["kubernetes.io/hostname", "example.com/rack", "topology.kubernetes.io/zone"]
    objects = render({"kv": {"near": keys}})
    for role, other in zip(WORKERS, reversed(WORKERS), strict=True):
        affinity = pod_of(workloads(objects)[role])["affinity"]["podAffinity"]
        terms = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == keys
        weights = [term["weight"] for term in terms]
        assert weights == sorted(set(weights), reverse=True)
        for labels in found_in(affinity, "matchLabels"):
            assert labels["app.kubernetes.io/component"] == other


def test_workers_of_one_node_prefer_their_host_before_near():
    kv = {"socketDirectory": {"claim": "sockets"}, "near": ["example.com/rack"]}
    affinity = pod_of(decode_with({}, kv))["affinity"]["podAffinity"]
    assert list(found_in(affinity, "topologyKey")) == ["kubernetes.io/hostname", "example.com/rack"]


def test_require_rdma_reaches_both_roles():
    objects = render({"kv": {"connector": "nixl", "requireRdma": True}})
    for role in WORKERS:
        variables = container_of(workloads(objects)[role])["env"]
        assert {"name": "BATON_REQUIRE_RDMA", "value": "true"} in variables


def test_device_claims_replace_resources_of_gpus():
    claims = [
        {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "selectors": ["true"], "count": 1},
        {"name": "nic", "templateName": "rdma"},
        {"name": "own", "claimName": "mine"},
    ]
    values = {"gpus": 1, "gpuResource": "", "deviceClaims": claims}
    objects = render({"decode": values})
    workload = decode_with(values)
    (template,) = of_kind(objects, "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    exactly = {"deviceClassName": "gpu.nvidia.com", "count": 1}
    assert request["exactly"] == {**exactly, "selectors": [{"cel": {"expression": "true"}}]}
    assert pod_of(workload)["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]},
        {"name": "nic", "resourceClaimTemplateName": "rdma"},
        {"name": "own", "resourceClaimName": "mine"},
    ]
    container = container_of(workload)
    assert container["resources"]["claims"] == [{"name": c["name"]} for c in claims]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert env_of(workload)["BATON_DEVICE"]["value"] == "cuda"
    # A template cannot be changed.
    claims[0]["count"] = 2
    (other,) = of_kind(render({"decode": values}), "ResourceClaimTemplate")
    assert other["metadata"]["name"] != template["metadata"]["name"]


def test_gpus_of_other_vendors_are_named_in_limits():
    limits = container_of(decode_with({"gpus": 1, "gpuResource": "amd.com/gpu"}))["resources"]
    assert limits["limits"]["amd.com/gpu"] == 1
    assert "claims" not in limits
