"""Models from the hub: their revision, the claim that the chart makes, the Job that fills it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.models import locate
from tests.helm.test_chart_network import Policies
from tests.support.hub import hub_with
from tests.support.rendered_chart import (
    component,
    container_of,
    env_of,
    labels_of_pods,
    merged,
    of_kind,
    pod_of,
    render,
    workloads,
)

HUB = {"source": "hub", "name": "someone/small"}
FILLED = {**HUB, "cache": {"size": "10Gi"}, "download": {"enabled": True}}


def job_of(objects):
    (job,) = of_kind(objects, "Job")
    return job


def test_revision_reaches_processes_and_not_served_name():
    objects = render({"model": {**HUB, "revision": "refs/pr/1"}, "tracing": {}})
    for process in ("router", "prefill", "decode"):
        variables = env_of(workloads(objects)[process])
        assert variables["BATON_MODEL"]["value"] == "someone/small@refs/pr/1"
    scaled = {"decode": {"autoscaling": {"enabled": True}}, "prefill": {"autoscaling":
              {"enabled": True}}, "autoscaling": {"prometheus": "http://a"}}  # fmt: skip
    for scaler in of_kind(render({"model": {**HUB, "revision": "v2"}, **scaled}), "ScaledObject"):
        if component(scaler) == "prefill":
            assert 'model="small"' in scaler["spec"]["triggers"][0]["metadata"]["query"]


def test_chart_makes_claim_that_stays_when_release_goes():
    cache = {"size": "10Gi", "storageClass": "fast", "accessModes": ["ReadWriteOnce"]}
    objects = render({"model": {**HUB, "cache": cache}})
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "10Gi"}},
    }
    for process in ("router", "prefill", "decode"):
        volumes = {v["name"]: v for v in pod_of(workloads(objects)[process])["volumes"]}
        used = volumes["cache"]["persistentVolumeClaim"]["claimName"]
        assert used == claim["metadata"]["name"]
    assert of_kind(objects, "Job") == []
    assert of_kind(render({"model": {**HUB, "cacheClaim": "mine"}}), "PersistentVolumeClaim") == []


@pytest.mark.e2e
def test_pods_start_once_job_has_downloaded(tmp_path: Path):
    """The Job's own command, and the one that pods wait by, with /cache in a folder of a test."""
    objects = render({"model": {**FILLED, "revision": "v2"}, "encode": {"replicas": 1}})
    program = tmp_path / "bin" / "baton"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m baton "$@"\n')
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def placed(arguments):
        return [argument.replace("/cache/", f"{tmp_path}/cache/") for argument in arguments]

    waits = []
    for process in ("router", "prefill", "decode", "encode"):
        (init,) = pod_of(workloads(objects)[process])["initContainers"]
        assert init["resources"] == container_of(workloads(objects)[process])["resources"]
        waits.append(init["args"])
    waiting = [subprocess.Popen(placed(arguments), env=variables) for arguments in waits]
    try:
        (container,) = job_of(objects)["spec"]["template"]["spec"]["containers"]
        home = placed([{v["name"]: v.get("value") for v in container["env"]}["HF_HOME"]])[0]
        with hub_with("someone/small", Path(locate("tiny"))) as address:
            told = {**variables, "HF_HOME": home, "HF_ENDPOINT": address}
            assert all(one.poll() is None for one in waiting)
            subprocess.run(placed(container["args"]), env=told, check=True, timeout=60)
        assert (tmp_path / "cache/huggingface/hub/models--someone--small/refs/v2").is_file()
        assert [one.wait(timeout=30) for one in waiting] == [0] * len(waiting)
    finally:
        for one in waiting:
            one.kill()


def test_failed_download_leaves_pods_waiting(tmp_path: Path):
    (container,) = job_of(render({"model": FILLED}))["spec"]["template"]["spec"]["containers"]
    arguments = [
        argument.replace("/cache/", f"{tmp_path}/cache/") for argument in container["args"]
    ]
    program = tmp_path / "baton"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(arguments, env=told, check=False, timeout=30).returncode != 0
    assert not (tmp_path / "cache").exists()


def test_each_change_of_job_is_another_job():
    """A Job cannot be changed; a claim that is filled makes another one short."""
    name = job_of(render({"model": FILLED}))["metadata"]["name"]
    assert job_of(render({"model": FILLED, "decode": {"replicas": 3}}))["metadata"]["name"] == name
    changes = (
        {"model": {**FILLED, "revision": "v2"}},
        {"model": FILLED, "image": {"tag": "2"}},
        {"model": FILLED, "podLabels": {"team": "llm"}},
        {"model": FILLED, "pod": {"env": [{"name": "A", "value": "1"}]}},
        {"model": {**FILLED, "download": {"enabled": True, "timeoutSeconds": 60}}},
    )
    names = {job_of(render(values))["metadata"]["name"] for values in changes}
    assert len({name, *names}) == 1 + len(changes)


def test_deployments_wait_as_long_as_download():
    for values, seconds in (({}, 0), ({"model": FILLED}, 3600)):
        found = workloads(render({**values, "endpointPicker": {"enabled": True}}))
        default = found["endpoint-picker"]["spec"].get("progressDeadlineSeconds", 600)
        assert default == 600 + seconds
        assert found["decode"]["spec"]["progressDeadlineSeconds"] == 900 + seconds
        assert found["router"]["spec"]["progressDeadlineSeconds"] == 900 + seconds
    assert job_of(render({"model": FILLED}))["spec"]["activeDeadlineSeconds"] == 3600


def test_download_reaches_hub_alone_and_is_restricted():
    values = {"model": FILLED, "pod": {"sidecars": [{"name": "a", "image": "b"}]}}
    objects = render(values)
    pod = job_of(objects)["spec"]["template"]["spec"]
    (container,) = pod["containers"]  # A Job whose sidecar runs on never ends.
    main = container_of(workloads(render({}))["router"])
    assert container["securityContext"] == main["securityContext"]
    assert pod["securityContext"] == pod_of(workloads(render({}))["router"])["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    policies = Policies(objects, merged(values), job_of(objects))
    edges = {edge for edge in policies.edges() if "download" in edge}
    assert edges == {("download", "dns", 53), ("download", "anywhere", 443)}
    labels = labels_of_pods(job_of(objects))
    assert labels["app.kubernetes.io/component"] == "download"
