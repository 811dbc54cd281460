"""Security of pods and secrets: the restricted standard, secrets only named."""

import json

import pytest

from tests.support.rendered_chart import (
    PRESETS,
    TOGETHER,
    container_of,
    labels_of_pods,
    of_kind,
    pod_of,
    preset,
    processes,
    render,
    render_tests,
    selects,
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

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.mark.parametrize("name", PRESETS)
def test_pods_meet_restricted_security_standard(name):
    for workload in workloads(preset(name)).values():
        pod, container = pod_of(workload), container_of(workload)
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == RESTRICTED
        assert not any("hostPort" in port for port in container["ports"])
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        by_path = values_of(name).get("kv", {}).get("socketDirectory", {}).get("hostPath")
        assert kinds <= (ALLOWED_VOLUMES | {"hostPath"} if by_path else ALLOWED_VOLUMES)


@pytest.mark.parametrize("name", TOGETHER)
def test_pods_have_no_api_token_and_no_service_links(name):
    objects = preset(name)
    accounts = of_kind(objects, "ServiceAccount")
    assert not any(account["automountServiceAccountToken"] for account in accounts)
    for workload in workloads(objects).values():
        assert pod_of(workload)["automountServiceAccountToken"] is False
        # A Service called "baton" would set BATON_PORT.
        assert pod_of(workload)["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ["values", "everything"])
def test_helm_test_is_restricted_and_only_let_in_by_hooks(name):
    pod, *policies = render_tests(values_of(name))
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == RESTRICTED
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["automountServiceAccountToken"] is False
    objects = render(values_of(name))
    for found in (pod, *policies):
        annotations = found["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        # Nothing stays: a policy would keep ports open for pods with the test's labels.
        assert set(annotations["helm.sh/hook-delete-policy"].split(",")) == {
            *("before-hook-creation", "hook-succeeded", "hook-failed")
        }
    # The log goes with the pod.
    assert pod["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-failed"
    reached = {
        component: port["port"]
        for policy in policies
        for component, workload in workloads(objects).items()
        if selects(policy["spec"]["podSelector"], labels_of_pods(workload))
        for rule in policy["spec"]["ingress"]
        if selects(rule["from"][0]["podSelector"], pod["metadata"]["labels"])
        for port in rule["ports"]
    }
    assert reached == {"router": 50051, "redis": 6379}


def test_helm_test_over_tls_needs_client_certificate():
    tls = {"tls": {"enabled": True, "certManager": {"issuer": "baton"}}}
    assert render_tests(tls) == []
    pod, *_ = render_tests({**tls, "helmTest": {"clientSecret": "client"}})
    assert pod["spec"]["volumes"][-1]["secret"]["secretName"] == "client"


@pytest.mark.parametrize("name", TOGETHER)
def test_chart_makes_no_secret(name):
    assert of_kind(preset(name), "Secret") == []


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://:$(REDIS_PASSWORD)@redis.data:6379/0", "redis://redis.data:6379/0"),
        ("rediss://baton:$(REDIS_PASSWORD)@redis.data", "rediss://baton@redis.data"),
    ],
)
def test_redis_password_reaches_processes_from_secret_as_it_is(url, told):
    objects = render({"redis": {"url": url, "existingSecret": "redis-password"}})
    for workload in workloads(objects).values():
        variables = {v["name"]: v for v in container_of(workload)["env"]}
        assert variables["BATON_REDIS_URL"]["value"] == told
        reference = variables["BATON_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "redis-password", "key": "password"}


def test_sentinel_password_is_filled_in_from_variable_above():
    url = "redis+sentinel://redis.data/main?sentinel_password=$(REDIS_PASSWORD)"
    objects = render({"redis": {"url": url, "existingSecret": "redis-password"}})
    for workload in workloads(objects).values():
        variables = {v["name"]: v for v in container_of(workload)["env"]}
        order = list(variables)
        # Kubernetes fills in only what stands above.
        assert order.index("REDIS_PASSWORD") < order.index("BATON_REDIS_URL")
        assert variables["BATON_REDIS_URL"]["value"] == url
        assert "BATON_REDIS_PASSWORD" not in variables


def test_redis_signing_keys_are_mounted_read_only_everywhere():
    objects = render({"redis": {"signingSecret": "keys-of-redis"}, "encode": {"replicas": 1}})
    for workload in processes(objects).values():
        container = container_of(workload)
        variables = {v["name"]: v.get("value") for v in container["env"]}
        path = variables["BATON_REDIS_SIGNING_KEY_FILE"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "redis-signing"]
        assert path == f"{mount['mountPath']}/keys"
        assert mount["readOnly"] is True
        (volume,) = [v for v in pod_of(workload)["volumes"] if v["name"] == "redis-signing"]
        assert volume["secret"] == {"secretName": "keys-of-redis"}
    assert "redis-signing" not in json.dumps(render({}))


def test_ingresses_and_routes_never_expose_admin_service():
    for found in of_kind(preset("everything"), "Ingress", "GRPCRoute", "HTTPRoute"):
        text = json.dumps(found)
        assert "baton.v1.Admin" not in text
        assert '"path": "/"' not in text
