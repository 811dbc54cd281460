"""References by name between objects of the chart: each is there, or said to be needed."""

import re
from textwrap import dedent

import kubernetes_validate
import pytest

from tests.support.rendered_chart import (
    CHART,
    PRESETS,
    TOGETHER,
    component,
    container_of,
    documents,
    found_in,
    labels_of_pods,
    merged,
    of_kind,
    pod_of,
    preset,
    processes,
    render,
    selects,
    values_of,
    workloads,
)
from tests.support.router.front import front_of
from tests.support.router.scripted import decode, prefill

README = (CHART / "README.md").read_text()
# Values that name objects made outside the chart.
GIVEN = (
    ("redis", "existingSecret"),
    ("redis", "signingSecret"),
    ("tls", "existingSecrets", "router"),
    ("tls", "existingSecrets", "encode"),
    ("tls", "existingSecrets", "prefill"),
    ("tls", "existingSecrets", "decode"),
    ("model", "claim"),
    ("model", "hubSecret"),
    ("model", "cacheClaim"),
    ("model", "cache", "storageClass"),
    ("kv", "socketDirectory", "claim"),
    ("router", "tenantsSecret"),
    ("router", "quotasConfigMap"),
    ("router", "aliasesConfigMap"),
    ("router", "chatTemplatesConfigMap"),
    ("tracing", "headersSecret"),
    ("helmTest", "clientSecret"),
    ("pod", "serviceAccount"),
    ("pod", "priorityClassName"),
    ("autoscaling", "authentication", "secret"),
    ("autoscaling", "authentication", "name"),
    ("gateway", "authorityConfigMap"),
    ("ingress", "grpc", "tlsSecret"),
    ("ingress", "http", "tlsSecret"),
)


def given(values):
    """The names that these values have, but for pull secrets."""
    for path in GIVEN:
        found = values
        for key in path:
            found = found[key]
        yield ".".join(path), found


@pytest.mark.parametrize("name", PRESETS)
def test_selectors_match_only_pods_of_own_component(name):
    objects = preset(name)
    pods = {c: labels_of_pods(w) for c, w in workloads(objects).items()}
    kinds = ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet")
    for found in of_kind(objects, *kinds, "PodMonitor"):
        spec = found["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        if found["kind"] == "Service":
            selector = {"matchLabels": selector}
        assert [c for c, labels in pods.items() if selects(selector, labels)] == [component(found)]


@pytest.mark.parametrize("name", PRESETS)
def test_pods_spread_from_own_kind_and_prefer_other_role(name):
    for own, workload in workloads(preset(name)).items():
        if own == "redis":
            continue
        labels = labels_of_pods(workload)
        pod = pod_of(workload)
        (spread,) = pod["topologySpreadConstraints"]
        assert selects(spread["labelSelector"], labels)
        (apart,) = found_in(pod["affinity"]["podAntiAffinity"], "labelSelector")
        assert selects(apart, labels)
        for near in found_in(pod["affinity"].get("podAffinity"), "labelSelector"):
            other = "decode" if own == "prefill" else "prefill"
            assert near["matchLabels"]["app.kubernetes.io/component"] == other


@pytest.mark.parametrize("name", PRESETS)
def test_probes_and_services_name_ports_of_containers(name):
    objects = preset(name)
    by_component = workloads(objects)
    for workload in by_component.values():
        container = container_of(workload)
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert len(set(ports.values())) == len(ports)
        probes = [probe for key, probe in container.items() if key.endswith("Probe")]
        assert probes
        for probe in probes:
            assert probe.get("grpc", {}).get("port", ports.get("grpc")) == ports.get("grpc")
            assert probe.get("tcpSocket", {}).get("port", "redis") in {*ports, "redis"}
            assert probe.get("httpGet", {}).get("port", "metrics") in {*ports, "metrics"}
    for service in of_kind(objects, "Service"):
        names = {p["name"] for p in container_of(by_component[component(service)])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for monitor in of_kind(objects, "PodMonitor"):
        names = {p["name"] for p in container_of(by_component[component(monitor)])["ports"]}
        assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= names


@pytest.mark.parametrize("name", PRESETS)
def test_ingresses_and_routes_lead_to_service_ports(name):
    objects = preset(name)
    services = {s["metadata"]["name"]: s["spec"]["ports"] for s in of_kind(objects, "Service")}
    for ingress in of_kind(objects, "Ingress"):
        for service in found_in(ingress, "service"):
            names = {port["name"] for port in services[service["name"]]}
            assert service["port"]["name"] in names
    for route in of_kind(objects, "GRPCRoute", "HTTPRoute"):
        for backends in found_in(route, "backendRefs"):
            for backend in backends:
                assert backend["port"] in {port["port"] for port in services[backend["name"]]}


async def test_ingress_and_route_lead_to_all_http_paths_of_clients():
    async with front_of(prefill(), decode()) as front:
        paths = set((await front.get("/openapi.json")).json()["paths"])
    # The page and probes are for operators. No rule may have "/" as a prefix: it covers /metrics.
    expected = {path for path in paths - {"/", "/health"} if not path.startswith("/v1/")}
    objects = preset("everything")
    (ingress,) = [i for i in of_kind(objects, "Ingress") if i["metadata"]["name"].endswith("-http")]
    (rule,) = ingress["spec"]["rules"]
    matched = {(path["path"], path["pathType"]) for path in rule["http"]["paths"]}
    assert matched == {("/v1", "Prefix"), *((path, "Exact") for path in expected)}
    (route,) = of_kind(objects, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    matched = {(match["path"]["value"], match["path"]["type"]) for match in rule["matches"]}
    assert matched == {("/v1", "PathPrefix"), *((path, "Exact") for path in expected)}


@pytest.mark.parametrize("name", TOGETHER)
def test_autoscaled_deployments_exist_and_set_no_replicas(name):
    objects = preset(name)
    deployments = {d["metadata"]["name"]: d for d in of_kind(objects, "Deployment")}
    scaled = set()
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        scaled.add(scaler["spec"]["scaleTargetRef"]["name"])
    for deployment in deployments.values():
        is_scaled = deployment["metadata"]["name"] in scaled
        assert ("replicas" not in deployment["spec"]) == is_scaled
    assert scaled <= deployments.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_pods_reference_only_declared_or_documented_objects(name):
    objects = preset(name)
    named = dict(given(merged(values_of(name))))
    accounts = {found["metadata"]["name"] for found in of_kind(objects, "ServiceAccount")}
    made = {found["spec"]["secretName"] for found in of_kind(objects, "Certificate")}
    for workload in workloads(objects).values():
        pod = pod_of(workload)
        assert pod["serviceAccountName"] in accounts
        volumes = pod["volumes"]
        needed = {
            *(ref["name"] for ref in found_in(pod, "secretKeyRef")),
            *(volume["secret"]["secretName"] for volume in volumes if "secret" in volume),
            *(volume["configMap"]["name"] for volume in volumes if "configMap" in volume),
            *(claim["claimName"] for claim in found_in(volumes, "persistentVolumeClaim")),
        }
        assert needed <= {*named.values(), *made}
        mounted = {mount["name"] for mount in container_of(workload)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in volumes}
    for ingress in of_kind(objects, "Ingress"):
        assert set(found_in(ingress, "secretName")) <= set(named.values())


def test_readme_documents_every_external_object():
    section = re.search(r"## What it needs from you\n(.*?)\n## ", README, re.DOTALL)
    assert section
    for path in GIVEN:
        assert f"`{'.'.join(path)}`" in section[1]


def test_readme_examples_are_values_or_objects_of_kubernetes():
    blocks = re.findall(r"^ *```yaml\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        for found in documents(dedent(block)):
            if "kind" in found:
                kubernetes_validate.validate(found, "1.36", strict=True)
            else:
                render(found)


def test_claims_of_one_node_are_made_as_readme_says():
    section = README.partition("## One node\n")[2].partition("\n## ")[0]
    volume, claim = documents(section.partition("```yaml\n")[2].partition("```")[0])
    values = merged(values_of("values-single-node"))
    assert claim["metadata"]["name"] == values["kv"]["socketDirectory"]["claim"]
    assert f"`{values['model']['cacheClaim']}`" in section
    for field in ("accessModes", "storageClassName"):
        assert claim["spec"][field] == volume["spec"][field]


def test_checkpoint_sources_are_same_for_router_and_workers():
    for model, path in (
        ({"source": "hub", "name": "org/m", "hubSecret": "hub", "cacheClaim": "cache"}, "org/m"),
        ({"source": "claim", "claim": "checkpoints", "name": "m"}, "/models/m"),
        ({"source": "image", "image": "registry.example/m:1", "name": ""}, "/models"),
    ):
        objects = render({"model": model, "encode": {"replicas": 1}})
        for workload in processes(objects).values():
            variables = {v["name"]: v.get("value") for v in container_of(workload)["env"]}
            assert variables["BATON_MODEL"] == path
            assert ("HF_HUB_OFFLINE" in variables) == (model["source"] != "hub")
            mounts = {m["mountPath"]: m for m in container_of(workload)["volumeMounts"]}
            assert ("/models" in mounts) == path.startswith("/models")
            assert mounts.get("/models", {}).get("readOnly", True)
