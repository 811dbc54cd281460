"""Refusals of wrong values, by a message that names the key."""

import helm_python as helm
import pytest

from tests.support.rendered_chart import render

REDIS = {"redis": {"url": "redis://:$(REDIS_PASSWORD)@redis:6379/0"}}
GRPC = {"enabled": True, "host": "grpc.example"}

WRONG = {
    "negative replicas": ({"decode": {"replicas": -1}}, "/decode/replicas"),
    "negative replicas of routers": ({"router": {"replicas": -2}}, "/router/replicas"),
    "an unknown key": ({"prefil": {}}, "'prefil'"),
    "an unknown key of a worker": ({"decode": {"replica": 2}}, "'replica'"),
    "an unknown setting": ({"decode": {"settings": {"max_num_seq": 2}}}, "'max_num_seq'"),
    "a setting out of bounds": ({"decode": {"settings": {"max_num_seqs": 0}}}, "/max_num_seqs"),
    "a setting of the other process": (
        {"router": {"settings": {"max_num_seqs": 2}}},
        "'max_num_seqs'",
    ),
    "a setting that the chart sets": ({"decode": {"settings": {"kv_port": 5}}}, "'kv_port'"),
    "KV port of another purpose": ({"ports": {"kv": 50051}}, "ports.kv"),
    "metrics port of another purpose": ({"ports": {"metrics": 8080}}, "ports.metrics"),
    "a port for root": ({"ports": {"grpc": 443}}, "/ports/grpc"),
    "TLS without a secret": ({"ingress": {"grpc": GRPC}}, "/ingress/grpc/tlsSecret"),
    "TLS between processes without a secret": (
        {"tls": {"enabled": True, "existingSecrets": {"router": "a", "prefill": "b"}}},
        "tls.existingSecrets.decode",
    ),
    "certificates for nothing": ({"tls": {"existingSecrets": {"router": "a"}}}, "tls.enabled"),
    "tokens in the clear": (
        {"tls": {"clientAuth": "token"}, "router": {"tenantsSecret": "a"}},
        "tls.clientAuth",
    ),
    "an issuer of an unknown kind": (
        {"tls": {"enabled": True, "certManager": {"issuer": "a", "issuerKind": "Vault"}}},
        "/tls/certManager/issuerKind",
    ),
    "half of a secret's name": (
        {"tls": {"enabled": True, "existingSecrets": {"router": "A_"}}},
        "/tls/existingSecrets/router",
    ),
    "an ingress without a host": ({"ingress": {"http": {"enabled": True}}}, "/ingress/http/host"),
    "an ingress for nobody": (
        {"ingress": {"http": {"enabled": True, "host": "http.example"}}},
        "router.http",
    ),
    "a route without a gateway": ({"gateway": {"grpcHostname": "a.example"}}, "/parentRefs"),
    "a password in the open": ({"redis": {"url": "redis://:pw@redis:6379/0"}}, "redis.url"),
    "a password without a secret": (REDIS, "redis.existingSecret"),
    "no Redis URL": ({"redis": {"url": "localhost:6379"}}, "/redis/url"),
    "a claim without a name": ({"model": {"source": "claim"}}, "/model/claim"),
    "an image without a name": ({"model": {"source": "image"}}, "/model/image"),
    "a model that is not shipped": ({"model": {"name": "llama"}}, "/model/name"),
    "remote code": ({"model": {"trustRemoteCode": True}}, "'trustRemoteCode'"),
    "a drain shorter than a lease": ({"prefill": {"drainSeconds": 30}}, "prefill.drainSeconds"),
    "memory for less than the pool": (
        {"decode": {"kvCacheSize": "3Gi"}},
        "decode.resources.limits.memory",
    ),
    "memory for less than pool and swap": (
        {"decode": {"settings": {"swap_bytes": 2**31}}},
        "decode.resources.limits.memory",
    ),
    "two GPUs for a worker": ({"decode": {"gpus": 2}}, "/decode/gpus"),
    "fewer at most than at least": (
        {"router": {"autoscaling": {"minReplicas": 7}}},
        "router.autoscaling.maxReplicas",
    ),
    "scaling by nobody's metrics": (
        {"decode": {"autoscaling": {"enabled": True}}},
        "autoscaling.prometheus",
    ),
    "a connector that pods cannot use": ({"kv": {"connector": "cuda-ipc"}}, "/kv/connector"),
    "two socket directories": (
        {"kv": {"socketDirectory": {"claim": "a", "hostPath": "/b"}}},
        "kv.socketDirectory",
    ),
    "shm without a socket directory": ({"kv": {"connector": "shm"}}, "kv.socketDirectory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_chart_refuses_wrong_value_naming_its_key(case):
    values, key = WRONG[case]
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    assert key in str(caught.value)


def test_chart_refusal_says_which_port_is_taken():
    with pytest.raises(helm.HelmError, match=r"50051 is ports\.grpc already"):
        render({"ports": {"kv": 50051}})
