"""Security of pods and secrets: the restricted standard, secrets only named."""

import json

import pytest

from tests.support.rendered_chart import (
    PRESETS,
    container_of,
    of_kind,
    pod_of,
    preset,
    render,
    values_of,
    workloads,
)

# What "restricted" allows from Kubernetes 1.33 on.
ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@pytest.mark.parametrize("name", PRESETS)
def test_pods_meet_restricted_security_standard(name):
    for workload in workloads(preset(name)).values():
        pod, container = pod_of(workload), container_of(workload)
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPort" in port for port in container["ports"])
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        by_path = values_of(name).get("kv", {}).get("socketDirectory", {}).get("hostPath")
        assert kinds <= (ALLOWED_VOLUMES | {"hostPath"} if by_path else ALLOWED_VOLUMES)


@pytest.mark.parametrize("name", PRESETS)
def test_pods_have_no_api_token_and_no_service_links(name):
    objects = preset(name)
    accounts = of_kind(objects, "ServiceAccount")
    assert not any(account["automountServiceAccountToken"] for account in accounts)
    for workload in workloads(objects).values():
        assert pod_of(workload)["automountServiceAccountToken"] is False
        # A Service called "baton" would set BATON_PORT.
        assert pod_of(workload)["enableServiceLinks"] is False


@pytest.mark.parametrize("name", PRESETS)
def test_chart_makes_no_secret(name):
    assert of_kind(preset(name), "Secret") == []


def test_redis_password_reaches_only_redis_url_from_secret():
    url = "redis://:$(REDIS_PASSWORD)@redis.data:6379/0"
    objects = render({"redis": {"url": url, "existingSecret": "redis-password"}})
    for workload in workloads(objects).values():
        variables = {v["name"]: v for v in container_of(workload)["env"]}
        order = list(variables)
        # Kubernetes fills in only what stands above.
        assert order.index("REDIS_PASSWORD") < order.index("BATON_REDIS_URL")
        assert variables["BATON_REDIS_URL"]["value"] == url
        reference = variables["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "redis-password", "key": "password"}


def test_ingresses_and_routes_never_expose_admin_service():
    for found in of_kind(preset("everything"), "Ingress", "GRPCRoute", "HTTPRoute"):
        text = json.dumps(found)
        assert "baton.v1.Admin" not in text
        assert '"path": "/"' not in text
