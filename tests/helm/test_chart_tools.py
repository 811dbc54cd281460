"""Helm and kubectl of two generations lint, render and read the chart as Helm's library does."""

import json
import subprocess

import pytest
import yaml

from tests.helm.test_chart_refusals import REFUSED_BY_API_SERVER
from tests.support.cluster.fake_api_server import api_server
from tests.support.kube_tools import WHEELS, tool
from tests.support.rendered_chart import (
    CHART,
    EVERYTHING,
    EXTENDED,
    IMAGES,
    NAMESPACE,
    TOGETHER,
    component,
    of_kind,
    preset,
    render,
    render_tests,
    values_of,
)

pytestmark = pytest.mark.system

# Helm takes the Kubernetes of its own time otherwise, and the chart needs 1.33.
KUBERNETES = ("--kube-version", "1.36.0")
# Values of devices, which no preset has.
DEVICES = {
    "deviceClaims": [{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}],
    "extraResources": {"rdma/hca_shared_devices_a": 1},
    "runtimeClassName": "nvidia",
    "networks": ["rdma-net"],
    "hostNetwork": True,
    "ipcLock": True,
    "memlock": "unlimited",
    "sharedMemory": "256Mi",
}


def run(major, name, *arguments, values=None, stdin=None):
    """Runs a tool with values in a file of their own; returns what it did."""
    command = [str(tool(name, major)), *map(str, arguments)]
    if values is not None:
        command += ["--values", "-"]
        stdin = json.dumps(values)
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def run_template(major, values, *options):
    arguments = ("template", "demo", CHART, "-n", NAMESPACE, *KUBERNETES, *options)
    return run(major, "helm", *arguments, values={**IMAGES, **values})


def template(major, values, *options):
    done = run_template(major, values, *options)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found is not None]


def key(found):
    return found["kind"], found["metadata"]["name"]


@pytest.mark.parametrize("major", WHEELS)
def test_helm_is_of_its_major_version(major):
    assert run(major, "helm", "version", "--short").stdout.startswith(f"v{major}.")


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("major", WHEELS)
def test_helm_lints_and_renders_as_its_library(major, name):
    done = run(major, "helm", "lint", "--strict", CHART, *KUBERNETES, values=values_of(name))
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = sorted(template(major, values_of(name)), key=key)
    assert rendered == sorted((*preset(name), *render_tests(values_of(name))), key=key)


@pytest.mark.parametrize("major", WHEELS)
def test_helm_refuses_what_api_server_would(major):
    for case, (values, _) in REFUSED_BY_API_SERVER.items():
        done = run_template(major, values)
        assert done.returncode != 0, case
        assert "Error: " in done.stderr
        assert "kubeVersion" not in done.stderr


@pytest.mark.parametrize("major", WHEELS)
def test_autoscaling_keeps_number_of_pods_that_cluster_has(major, tmp_path):
    scaling = {"autoscaling": {"enabled": True, "minReplicas": 2}}
    values = {
        **dict.fromkeys(("router", "prefill", "decode"), scaling),
        "encode": {"autoscaling": {"enabled": True, "minReplicas": 0}},
        "autoscaling": {"prometheus": "http://prometheus:9090"},
    }
    # None of prefill; at 0 an autoscaler is off, but one of KEDA's that may scale to 0.
    numbers = {"router": 4, "decode": 0, "encode": 0}
    rendered = (*render(values), *render_tests(values))
    present = [d for d in of_kind(rendered, "Deployment") if component(d) in numbers]
    owner = {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": NAMESPACE}
    for deployment in present:
        deployment["metadata"]["annotations"] = owner
        deployment["spec"]["replicas"] = numbers[component(deployment)]
    kinds = {(found["apiVersion"], found["kind"]) for found in rendered}
    with api_server(tmp_path, kinds, present) as config:
        options = ("--dry-run=server", "--kubeconfig", config, "--disable-openapi-validation")
        deployments = of_kind(template(major, values, *options), "Deployment")
    replicas = {component(found): found["spec"].get("replicas") for found in deployments}
    assert replicas == {"router": 4, "prefill": None, "decode": 2, "encode": 0}


@pytest.mark.parametrize("major", WHEELS)
def test_kubectl_reads_every_object_of_the_chart(major, tmp_path):
    objects = template(major, values_of(EVERYTHING))
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects))
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    done = run(major, "kubectl", "kustomize", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(yaml.safe_load_all(done.stdout), key=key) == sorted(objects, key=key)


@pytest.mark.parametrize(
    "values", [values_of(EVERYTHING), values_of(EXTENDED), {"prefill": DEVICES}]
)
@pytest.mark.parametrize("major", WHEELS)
def test_kubectl_knows_every_field_of_workloads(major, values):
    """A typed object loses the fields that this version of Kubernetes does not know."""
    given = of_kind(template(major, values), "Deployment", "StatefulSet")
    edit = ("set", "env", "--local", "-f", "-", "-o", "json", "ADDED=1")
    for workload in given:
        done = run(major, "kubectl", *edit, stdin=json.dumps(workload))
        assert done.returncode == 0, done.stderr
        assert_contains(json.loads(done.stdout), workload, workload["metadata"]["name"])


def assert_contains(outer, inner, path):
    """Every field of `inner` is in `outer`, which may have more."""
    if isinstance(inner, dict):
        for name, value in inner.items():
            assert name in outer, f"{path}.{name}"
            assert_contains(outer[name], value, f"{path}.{name}")
    elif isinstance(inner, list):
        assert len(outer) >= len(inner), path
        for position, value in enumerate(inner):
            assert_contains(outer[position], value, f"{path}[{position}]")
    else:
        assert str(outer) == str(inner), path
