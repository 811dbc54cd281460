"""Refusals of wrong values, by a message that names the key."""

import helm_python as helm
import pytest

from tests.support.rendered_chart import render

REDIS = {"redis": {"url": "redis://:$(REDIS_PASSWORD)@redis:6379/0"}}
HUB = {"source": "hub", "name": "org/model"}
LONG_POLICY = {"type": "Pods", "value": 1, "periodSeconds": 1801}
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
    "an ingress without a port": (
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
    "scaling without metrics": (
        {"decode": {"autoscaling": {"enabled": True}}},
        "autoscaling.prometheus",
    ),
    "an unknown connector": ({"kv": {"connector": "rdma"}}, "/kv/connector"),
    "GPU memory that pods cannot open": ({"kv": {"connector": "cuda-ipc"}}, "prefill.hostIPC"),
    "RDMA by a connector without": ({"kv": {"requireRdma": True}}, "kv.requireRdma"),
    "equal ports on one host": (
        {"kv": {"near": ["kubernetes.io/hostname"]}, "decode": {"hostNetwork": True}},
        "kv.near",
    ),
    "networks said twice": (
        {
            "decode": {"networks": ["rdma"]},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        },
        "decode.networks",
    ),
    "a device without a domain": (
        {"decode": {"extraResources": {"rdma": 1}}},
        "'rdma' does not match",
    ),
    "half a device": ({"decode": {"extraResources": {"rdma/hca": 0.5}}}, "/rdma~1hca"),
    "a variable without a name": ({"pod": {"env": [{"value": "1"}]}}, "/pod/env/0"),
    "a number as a variable": ({"pod": {"env": [{"name": "A", "value": 1}]}}, "/pod/env/0/value"),
    "a variable of two sources": (
        {"pod": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {}}}]}},
        "/pod/env/0",
    ),
    "variables from two objects": (
        {"pod": {"envFrom": [{"secretRef": {"name": "a"}, "configMapRef": {"name": "b"}}]}},
        "/pod/envFrom/0",
    ),
    "a volume of nothing": ({"router": {"pod": {"volumes": [{"name": "a"}]}}}, "/pod/volumes/0"),
    "a mount without a path": (
        {"decode": {"pod": {"volumeMounts": [{"name": "tmp"}]}}},
        "/decode/pod/volumeMounts/0",
    ),
    "a mount of no volume": (
        {"pod": {"volumeMounts": [{"name": "data", "mountPath": "/a"}]}},
        "pod.volumeMounts: names the volume data",
    ),
    "a sidecar without an image": ({"pod": {"sidecars": [{"name": "a"}]}}, "/pod/sidecars/0"),
    "a sidecar of the name of the process": (
        {"router": {"pod": {"sidecars": [{"name": "router", "image": "a"}]}}},
        "pod.sidecars: has a container router",
    ),
    "a size that is none": ({"pod": {"tmpSize": "much"}}, "/pod/tmpSize"),
    "an account of no name": ({"pod": {"serviceAccount": "A_"}}, "/pod/serviceAccount"),
    "a number as an annotation": (
        {"redis": {"pod": {"serviceAccountAnnotations": {"a": 1}}}},
        "/redis/pod/serviceAccountAnnotations/a",
    ),
    "a number as a priority": ({"pod": {"priorityClassName": 1000}}, "/pod/priorityClassName"),
    "an affinity of no kind": ({"pod": {"affinity": {"podAffinities": {}}}}, "'podAffinities'"),
    "a spread over nothing": (
        {"pod": {"topologySpreadConstraints": [{"maxSkew": 1}]}},
        "/pod/topologySpreadConstraints/0",
    ),
    "a revision of a shipped model": ({"model": {"revision": "v2"}}, "/model/revision"),
    "a cache of a shipped model": ({"model": {"cache": {"size": "1Gi"}}}, "/model/cache/size"),
    "a claim of an unknown mode": (
        {"model": {**HUB, "cache": {"size": "1Gi", "accessModes": ["Many"]}}},
        "/model/cache/accessModes/0",
    ),
    "two claims for a cache": (
        {"model": {**HUB, "cacheClaim": "a", "cache": {"size": "1Gi"}}},
        "model.cache.size",
    ),
    "a download into no claim": (
        {"model": {**HUB, "download": {"enabled": True}}},
        "model.download.enabled",
    ),
    "a class without a load balancer": (
        {"router": {"service": {"loadBalancerClass": "a"}}},
        "/router/service/loadBalancerClass",
    ),
    "a policy of outside traffic inside": (
        {"router": {"service": {"externalTrafficPolicy": "Local"}}},
        "/router/service/externalTrafficPolicy",
    ),
    "an unknown type of a Service": (
        {"router": {"service": {"type": "ExternalName"}}},
        "/router/service/type",
    ),
    "a number as a Service's annotation": (
        {"router": {"service": {"annotations": {"a": 1}}}},
        "/router/service/annotations/a",
    ),
    "a download of more than a week": (
        {"model": {"download": {"timeoutSeconds": 1000000}}},
        "/model/download/timeoutSeconds",
    ),
    "half a budget": (
        {"decode": {"disruptionBudget": {"minAvailable": 0.5}}},
        "/decode/disruptionBudget/minAvailable",
    ),
    "a budget of no part": (
        {"router": {"disruptionBudget": {"maxUnavailable": "half"}}},
        "/router/disruptionBudget/maxUnavailable",
    ),
    "a Redis of an unknown resource": (
        {"redis": {"resources": {"claims": []}}},
        "/redis/resources",
    ),
    "a test whose limit is under its request": (
        {"helmTest": {"resources": {"limits": {"memory": "1Mi"}}}},
        "helmTest.resources.limits.memory",
    ),
    "a behavior of an unknown direction": (
        {"decode": {"autoscaling": {"behavior": {"scaleAway": {}}}}},
        "'scaleAway'",
    ),
    "a policy longer than an hour's half": (
        {"router": {"autoscaling": {"behavior": {"scaleUp": {"policies": [LONG_POLICY]}}}}},
        "/periodSeconds",
    ),
    "a number in a trigger": (
        {"decode": {"autoscaling": {"triggers": [{"type": "cron", "metadata": {"a": 4}}]}}},
        "/decode/autoscaling/triggers/0/metadata/a",
    ),
    "a negative fallback": (
        {"decode": {"autoscaling": {"fallback": {"replicas": -1}}}},
        "/decode/autoscaling/fallback/replicas",
    ),
    "routers scaled by a queue that no Prometheus reads": (
        {"router": {"autoscaling": {"enabled": True, "queuedRequests": 8}}},
        "autoscaling.prometheus",
    ),
    "triggers without KEDA": (
        {"router": {"autoscaling": {"triggers": [{"type": "cron"}]}}},
        "router.autoscaling.triggers",
    ),
    "an unknown way to show who asks": (
        {"autoscaling": {"authentication": {"modes": ["token"]}}},
        "/autoscaling/authentication/modes/0",
    ),
    "a way without a secret": (
        {"autoscaling": {"authentication": {"modes": ["bearer"]}}},
        "autoscaling.authentication.modes",
    ),
    "a secret without a way": (
        {"autoscaling": {"authentication": {"secret": "a"}}},
        "autoscaling.authentication.modes",
    ),
    "two ways at once": (
        {"autoscaling": {"authentication": {"modes": ["tls"], "secret": "a", "name": "b"}}},
        "autoscaling.authentication.name",
    ),
    "a claim of two sources": (
        {"decode": {"deviceClaims": [{"name": "a", "claimName": "b", "templateName": "c"}]}},
        "/decode/deviceClaims/0",
    ),
    "a count of a claim that is there": (
        {"decode": {"deviceClaims": [{"name": "a", "claimName": "b", "count": 2}]}},
        "/decode/deviceClaims/0",
    ),
    "a GPU of no name": ({"decode": {"gpus": 1, "gpuResource": ""}}, "decode.gpuResource"),
    "a runbook without a host": (
        {"monitoring": {"runbookUrl": "docs/operations.md"}},
        "/monitoring/runbookUrl",
    ),
    "a relabeling of no action": (
        {"monitoring": {"relabelings": [{"action": "rename"}]}},
        "/monitoring/relabelings/0/action",
    ),
    "a number as an exporter": ({"redis": {"exporter": {"image": 1}}}, "/redis/exporter/image"),
    "a timeout without a unit": (
        {"gateway": {"timeouts": {"request": "30"}}},
        "/gateway/timeouts/request",
    ),
    "a Gateway's TLS to routers in the clear": (
        {"gateway": {"authorityConfigMap": "a"}},
        "gateway.authorityConfigMap",
    ),
    "a short digest": ({"image": {"router": {"digest": "sha256:12"}}}, "/image/router/digest"),
    "a name with a tag": (
        {"image": {"worker": {"repository": "b:1"}}},
        "/image/worker/repository",
    ),
    "a repository with a tag": (
        {"image": {"worker": {"repository": "a.example/b:1"}}},
        "/image/worker/repository",
    ),
    "an unknown key of pods": ({"pod": {"sidecar": []}}, "'sidecar'"),
    "an object without a kind": ({"extraObjects": [{"apiVersion": "v1"}]}, "/extraObjects/0"),
    "two socket directories": (
        {"kv": {"socketDirectory": {"claim": "a", "hostPath": "/b"}}},
        "kv.socketDirectory",
    ),
    "shm without a socket directory": ({"kv": {"connector": "shm"}}, "kv.socketDirectory"),
}

# Each rendered once, and was refused by an API server (1.36) when it was applied.
SCALED = {"autoscaling": {"prometheus": "http://prometheus:9090"}}
REFUSED_BY_API_SERVER = {
    "a drain longer than an autoscaler waits": (
        {"decode": {"drainSeconds": 1801, "autoscaling": {"enabled": True}}, **SCALED},
        r"decode\.drainSeconds: is 1801; expected at most 1800",
    ),
    "a label that selectors need": (
        {"podLabels": {"app.kubernetes.io/component": "x"}},
        r"podLabels: has app\.kubernetes\.io/component",
    ),
    "a label of the Deployment": (
        {"podLabels": {"pod-template-hash": "x"}},
        "podLabels: has pod-template-hash",
    ),
    "a label that is none": ({"podLabels": {"two words": "x"}}, "two words"),
    "a label's value that is none": ({"podLabels": {"team": "two words"}}, "/podLabels/team"),
    "an upgrade that cannot move": (
        {"decode": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}},
        r"decode\.rollout\.maxSurge: is 0, and so is maxUnavailable",
    ),
    "an upgrade that cannot move by percents": (
        {"prefill": {"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}},
        r"prefill\.rollout\.maxSurge",
    ),
    "a limit under its request": (
        {"router": {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "1"}}}},
        r"router\.resources\.limits\.cpu: is 1; expected no less than the request, 1500m",
    ),
    "a memory limit under its request": (
        {"prefill": {"resources": {"requests": {"memory": "4Gi"}, "limits": {"memory": "4G"}}}},
        r"prefill\.resources\.limits\.memory: is 4G; expected no less than the request, 4Gi",
    ),
    "a device that is shared": (
        {"router": {"resources": {"requests": {"example.com/a": 1}}}},
        r"router\.resources\.requests\.example\.com/a: is 1; expected the limit, none",
    ),
    "an annotation's key that is none": ({"podAnnotations": {"a b": "x"}}, "/podAnnotations"),
    "a node's label that is none": (
        {"decode": {"nodeSelector": {"a b": "x"}}},
        "/decode/nodeSelector",
    ),
    "a node's label of two words": (
        {"decode": {"nodeSelector": {"a": "x y"}}},
        "/decode/nodeSelector",
    ),
    "an unknown resource": (
        {"prefill": {"resources": {"limits": {"nosuch": 1}}}},
        "/prefill/resources",
    ),
    "a GPU without a domain": ({"decode": {"gpuResource": "gpu"}}, "/decode/gpuResource"),
    "a network without its length": (
        {"networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0"}}]}},
        "/networkPolicy/clients",
    ),
    "a network that is no exception": (
        {
            "networkPolicy": {
                "clients": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/9"]}}]
            }
        },
        r"networkPolicy\.clients: except has 11\.0\.0\.0/9; expected a part of 10\.0\.0\.0/8",
    ),
    "ports that end before they begin": (
        {"networkPolicy": {"egress": [{"ports": [{"port": 9000, "endPort": 8999}]}]}},
        r"networkPolicy\.egress\[0\]\.ports: endPort is 8999; expected no less than port, 9000",
    ),
    "a selector of two words": (
        {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": "x y"}}}]}},
        "/networkPolicy/clients",
    ),
    "an expression without values": (
        {
            "networkPolicy": {
                "dns": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]
            }
        },
        "/networkPolicy/dns",
    ),
    "a star within a host": (
        {"ingress": {"http": {"enabled": True, "host": "*bad"}}, "router": {"http": True}},
        "/ingress/http/host",
    ),
    "a host in capitals": (
        {"ingress": {"http": {"enabled": True, "host": "Bad"}}, "router": {"http": True}},
        "/ingress/http/host",
    ),
    "a taint that exists with a value": (
        {"router": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
        "/router/tolerations",
    ),
    "a taint's key that is none": (
        {"router": {"tolerations": [{"key": "a b", "operator": "Exists"}]}},
        "/router/tolerations",
    ),
    "a path that goes up": (
        {"kv": {"socketDirectory": {"hostPath": "/var/../etc"}}},
        "/kv/socketDirectory/hostPath",
    ),
    "more than all pods away": (
        {"decode": {"rollout": {"maxUnavailable": "200%"}}},
        "/decode/rollout/maxUnavailable",
    ),
    # These it admits, and the pods never start.
    "a tag of two words": ({"image": {"registry": "a", "tag": "a b"}}, "/image/tag"),
    "a registry as a URL": ({"image": {"registry": "https://a"}}, "/image/registry"),
    "no registry": (
        {"image": {"registry": ""}},
        r"image\.registry: is empty; expected .*Set it, or image\.pullPolicy: Never",
    ),
    "an image in capitals": ({"redis": {"image": "Bad Image"}}, "/redis/image"),
}


@pytest.mark.parametrize("case", REFUSED_BY_API_SERVER)
def test_chart_refuses_what_api_server_would_with_reason(case):
    values, reason = REFUSED_BY_API_SERVER[case]
    with pytest.raises(helm.HelmError, match=reason):
        render(values)


def test_chart_accepts_values_at_bounds_of_api_server():
    long = {"drainSeconds": 1800, "autoscaling": {"enabled": True}}
    equal = {"requests": {"cpu": "1000m"}, "limits": {"cpu": 1, "memory": "1Gi"}}
    render({"decode": {**long, "rollout": {"maxSurge": 0, "maxUnavailable": "1%"}}, **SCALED})
    render({"decode": {"drainSeconds": 7200}, "podLabels": {"example.com/team": "llm"}})
    render({"router": {"resources": equal}})
    render({"image": {"registry": "", "pullPolicy": "Never"}})
    device = {"requests": {"example.com/a": 1}, "limits": {"example.com/a": 1}}
    render({"router": {"resources": device}})


@pytest.mark.parametrize("case", WRONG)
def test_chart_refuses_wrong_value_naming_its_key(case):
    values, key = WRONG[case]
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    assert key in str(caught.value)


def test_chart_refusal_says_which_port_is_taken():
    with pytest.raises(helm.HelmError, match=r"50051 is ports\.grpc already"):
        render({"ports": {"kv": 50051}})
