"""Additions of operators to pods: variables, volumes, containers, of all pods or of one role."""

from functools import cache

import pytest

from tests.support.rendered_chart import (
    EXTENDED,
    PRESETS,
    component,
    container_of,
    env_of,
    of_kind,
    pod_of,
    preset,
    render,
    render_tests,
    values_of,
    workloads,
)

PODS = ("router", "prefill", "decode", "encode", "endpoint-picker", "redis")
ADDED = {"envFrom", "initContainers", "priorityClassName", "schedulerName", "resourceClaims"}


def key_of(name):
    """The key of values of a component."""
    return {"endpoint-picker": "endpointPicker"}.get(name, name)


@cache
def plain_workloads():
    """Those of the extended preset, but that nothing is added to all pods."""
    return workloads(render({**values_of(EXTENDED), "pod": {}}))


def names(entries, key="name"):
    return [entry[key] for entry in entries]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_add_nothing_to_pods(name):
    for workload in workloads(preset(name)).values():
        assert not pod_of(workload).keys() & ADDED
        assert not container_of(workload).keys() & ADDED


def test_pod_values_reach_every_pod():
    found = workloads(preset(EXTENDED))
    assert found.keys() == set(PODS)
    for name, plain in plain_workloads().items():
        pod = pod_of(found[name])
        (main, *sidecars) = pod["containers"]
        (before, *beside) = pod_of(plain)["containers"]
        assert main["name"] == before["name"]
        assert names(main["env"])[:-2] == names(before["env"])
        assert names(main["env"])[-2:] == ["HTTPS_PROXY", "NODE_NAME"]
        assert main["envFrom"] == [
            {"prefix": "MORE_", "secretRef": {"name": "more", "optional": True}}
        ]
        assert main["volumeMounts"][-1]["mountPath"] == "/etc/authorities"
        assert pod["volumes"][-1] == {"name": "authorities", "configMap": {"name": "authorities"}}
        assert names(pod["initContainers"])[-1:] == ["waits"]
        assert names(sidecars) == [*names(beside), "logs"]


@pytest.mark.parametrize("name", PODS)
def test_pod_values_of_role_come_on_top_for_it_alone(name):
    variables = [{"name": "A", "value": "role"}, {"name": "C", "value": "role"}]
    values = {
        "pod": {"env": [{"name": "A", "value": "all"}, {"name": "B", "value": "all"}]},
        "encode": {"replicas": 1},
        "endpointPicker": {"enabled": True},
    }
    values[key_of(name)] = {**values.get(key_of(name), {}), "pod": {"env": variables}}
    for other, workload in workloads(render(values)).items():
        found = {key: env_of(workload).get(key, {}).get("value") for key in "ABC"}
        expected = ("role", "all", "role") if other == name else ("all", "all", None)
        assert tuple(found.values()) == expected


def test_pod_values_replace_what_chart_names_alike_in_place():
    """A server that applies refuses a list with two entries of one key."""
    own = {
        "env": [{"name": "HF_HOME", "value": "/data"}],
        "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "mine"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache", "subPath": "a"}],
    }
    plain = workloads(render({}))["decode"]
    changed = workloads(render({"decode": {"pod": own}}))["decode"]
    before, after = container_of(plain), container_of(changed)
    assert names(after["env"]) == names(before["env"])
    assert env_of(changed)["HF_HOME"]["value"] == "/data"
    assert names(after["volumeMounts"], "mountPath") == names(before["volumeMounts"], "mountPath")
    volumes = {volume["name"]: volume for volume in pod_of(changed)["volumes"]}
    assert volumes["cache"] == own["volumes"][0]
    assert names(pod_of(changed)["volumes"]) == names(pod_of(plain)["volumes"])


def test_added_containers_are_restricted_by_default():
    container = {"name": "a", "image": "registry.example/a:1"}
    open_one = {**container, "name": "b", "securityContext": {"readOnlyRootFilesystem": False}}
    pod = {"initContainers": [{**container, "name": "c"}], "sidecars": [container, open_one]}
    found = pod_of(workloads(render({"router": {"pod": pod}}))["router"])
    main, plain, changed = (c["securityContext"] for c in found["containers"])
    assert plain == main == found["initContainers"][0]["securityContext"]
    assert changed == {**main, "readOnlyRootFilesystem": False}


def test_extra_objects_are_rendered_as_templates():
    found = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "{{ .Release.Name }}-a"}}
    text = 'kind: ConfigMap\nmetadata:\n  name: {{ include "baton.fullname" . }}-b\n'
    objects = render({"extraObjects": [found, text]})
    given = {o["metadata"]["name"] for o in of_kind(objects, "ConfigMap")}
    assert given == {"demo-a", "demo-baton-b"}
    assert all(component(o) != "more" for o in of_kind(preset("everything"), "ConfigMap"))


def test_service_accounts_are_annotated_or_existing_ones():
    for found in of_kind(preset(EXTENDED), "ServiceAccount"):
        role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/baton"}
        assert found["metadata"]["annotations"] == role
    values = {"pod": {"serviceAccount": "all"}, "prefill": {"pod": {"serviceAccount": "mine"}}}
    objects = render({**values, "endpointPicker": {"enabled": True}})
    assert of_kind(objects, "ServiceAccount") == []
    used = {name: pod_of(found)["serviceAccountName"] for name, found in workloads(objects).items()}
    assert used.pop("prefill") == "mine"
    assert set(used.values()) == {"all"}
    made = of_kind(render({"redis": {"pod": {"serviceAccount": "mine"}}}), "ServiceAccount")
    assert {component(found) for found in made} == {"router", "prefill", "decode"}


def test_folders_of_pods_have_size_limits():
    limited = {"pod": {"tmpSize": "1Gi", "cacheSize": "20Gi"}, "endpointPicker": {"enabled": True}}
    for name, workload in workloads(render(limited)).items():
        volumes = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
        if name != "redis":
            assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "1Gi"}
            assert volumes["cache"]["emptyDir"] == {"sizeLimit": "20Gi"}
    claim = {"model": {"source": "hub", "name": "org/m", "cacheClaim": "cache"}}
    volumes = pod_of(workloads(render({**claim, "pod": {"cacheSize": "1Gi"}}))["decode"])["volumes"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}} in volumes


def test_pods_request_ephemeral_storage():
    storage = {"requests": {"ephemeral-storage": "10Gi"}, "limits": {"ephemeral-storage": "20Gi"}}
    found = container_of(workloads(render({"decode": {"resources": storage}}))["decode"])
    assert found["resources"]["requests"]["ephemeral-storage"] == "10Gi"
    storage["limits"]["ephemeral-storage"] = "5Gi"
    with pytest.raises(Exception, match=r"decode\.resources\.limits\.ephemeral-storage: is 5Gi"):
        render({"decode": {"resources": storage}})


def test_scheduling_of_pods_adds_to_chart_and_replaces_by_kind():
    for name, workload in workloads(preset(EXTENDED)).items():
        pod, plain = pod_of(workload), pod_of(plain_workloads()[name])
        assert (pod["priorityClassName"], pod["schedulerName"]) == ("serving", "volcano")
        assert pod["nodeSelector"] == {**plain.get("nodeSelector", {}), "zone": "a"}
        assert pod["tolerations"][:-1] == plain.get("tolerations", [])
        assert pod["tolerations"][-1]["key"] == "dedicated"
        assert pod["affinity"].keys() == {"nodeAffinity", *plain.get("affinity", {})}
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        labels = spread["labelSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == name
    (test, *_) = render_tests(values_of(EXTENDED))
    assert test["spec"]["schedulerName"] == "volcano"
    assert test["spec"]["nodeSelector"] == {"zone": "a"}
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    values = {"decode": {"pod": {"affinity": {"podAntiAffinity": rule}}}}
    assert pod_of(workloads(render(values))["decode"])["affinity"]["podAntiAffinity"] == rule


def test_each_image_has_own_repository_and_digest():
    digest = "sha256:" + "0" * 64

    def images(**values):
        found = workloads(render({**values, "endpointPicker": {"enabled": True}}))
        return {name: container_of(workload)["image"] for name, workload in found.items()}

    named = images(
        image={
            "registry": "registry.example",
            "tag": "2",
            "router": {"digest": digest},
            "worker": {"repository": "mirror.example/worker"},
        },
        redis={"image": f"docker.io/library/redis@{digest}"},
    )
    assert named == {
        **dict.fromkeys(("router", "endpoint-picker"), f"registry.example/baton-router@{digest}"),
        **dict.fromkeys(("prefill", "decode"), "mirror.example/worker:2"),
        "redis": f"docker.io/library/redis@{digest}",
    }
    both = {"repository": "mirror.example/worker", "digest": digest}
    assert images(image={"worker": both})["decode"] == f"mirror.example/worker@{digest}"


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ({}, {}, "0"),
        ({"source": "hub", "name": "a/b"}, {}, "0"),
        ({"source": "hub", "name": "a/b", "cacheClaim": "models"}, {}, None),
        ({}, {"packed_weights_bytes": 2**30}, "1073741824"),
    ],
)
def test_pods_pack_weights_into_claims_alone(model, settings, expected):
    """A folder of the pod's own would take the size of the model, for no other worker."""
    workers = workloads(render({"model": model, "decode": {"settings": settings}}))
    env = env_of(workers["decode"])
    assert env["XDG_CACHE_HOME"]["value"] == "/cache"
    assert env.get("BATON_PACKED_WEIGHTS_BYTES", {}).get("value") == expected
