"""Two releases of the chart, each with the workers of a model, behind the routers of the first."""

import re
from typing import Any

import pytest
import yaml

from baton.settings.loading import load
from baton_decode_worker.settings import DecodeSettings
from baton_router.settings import RouterSettings
from tests.support.rendered_chart import (
    NAMESPACE,
    WORKERS,
    component,
    env_of,
    labels_of_pods,
    notes,
    of_kind,
    pod_of,
    render,
    render_tests,
    selects,
    workloads,
)
from tests.support.repository import ROOT

GUIDE = ROOT / "docs" / "guides" / "several-models.md"


def values_of_guide() -> dict[str, Any]:
    """Returns the values of the releases that the guide describes, by their names."""
    text = GUIDE.read_text(encoding="utf-8")
    files = re.findall(r"```yaml\n# (\w+)\.yaml\n(.*?)```", text, re.DOTALL)
    return {name: yaml.safe_load(values) for name, values in files}


@pytest.fixture(scope="module")
def both() -> dict[str, list[Any]]:
    """The objects of these releases."""
    return {name: render(values, name) for name, values in values_of_guide().items()}


def model_of(objects: list[Any], process: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = RouterSettings if process == "router" else DecodeSettings
    value = env_of(workloads(objects)[process])["BATON_MODEL"]["value"]
    with monkeypatch.context() as patched:
        patched.setenv("BATON_MODEL", value)
        return load(settings, [])


def test_routers_of_one_release_serve_the_models_of_both(both, monkeypatch):
    router = model_of(both["chat"], "router", monkeypatch)
    assert router.models == {"chat": "Qwen/Qwen3-8B", "coder": "Qwen/Qwen2.5-Coder-7B-Instruct"}
    for name, objects in both.items():
        for role in WORKERS:
            worker = model_of(objects, role, monkeypatch)
            assert (worker.model_name, worker.model_path) == (name, router.models[name])
    assert workloads(both["coder"])["router"]["spec"]["replicas"] == 0


def test_releases_of_two_models_share_one_redis(both):
    urls = {
        env_of(workload)["BATON_REDIS_URL"]["value"]
        for objects in both.values()
        for workload in workloads(objects).values()
    }
    assert urls == {"redis://redis.data:6379/0"}


def test_policies_let_routers_reach_workers_of_both_releases(both):
    routers = labels_of_pods(workloads(both["chat"])["router"])
    policies = {
        (name, component(policy)): policy["spec"]
        for name, objects in both.items()
        for policy in of_kind(objects, "NetworkPolicy")
    }
    for name, objects in both.items():
        for role in WORKERS:
            worker = labels_of_pods(workloads(objects)[role])
            sources = [p for rule in policies[name, role]["ingress"] for p in rule["from"]]
            assert any(selects(peer.get("podSelector", {"matchLabels": {"no": "pod"}}), routers)
                       for peer in sources)  # fmt: skip
            rules = policies["chat", "router"]["egress"]
            targets = [peer for rule in rules for peer in rule.get("to", ())]
            assert any("podSelector" in t and selects(t["podSelector"], worker) for t in targets)


def test_workers_of_two_releases_reach_each_other_at_no_port(both):
    other = labels_of_pods(workloads(both["coder"])["decode"])
    for policy in of_kind(both["chat"], "NetworkPolicy"):
        if component(policy) in WORKERS:
            peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
            assert not any("podSelector" in p and selects(p["podSelector"], other) for p in peers)


def test_notes_and_helm_test_ask_routers_of_other_release(both):
    routers = workloads(both["chat"])["router"]
    address = f"{routers['metadata']['name']}.{NAMESPACE}.svc:50051"
    pod, *policies = render_tests(values_of_guide()["coder"], "coder")
    (container,) = pod["spec"]["containers"]
    variables = {v["name"]: v["value"] for v in container["env"]}
    assert (variables["BATON_ADDRESS"], variables["SERVED_MODEL"]) == (address, "coder")
    (policy,) = policies
    assert selects(policy["spec"]["podSelector"], labels_of_pods(routers))
    said = notes(values_of_guide()["coder"], "coder")
    assert f"port-forward deployment/{routers['metadata']['name']} " in said
    assert "--model coder --address" in said
    assert "coder-baton-router" not in said


def test_aliases_of_chart_are_mounted_for_routers(both):
    router = workloads(both["chat"])["router"]
    assert env_of(router)["BATON_MODEL_ALIASES"]["value"] == "/etc/baton/aliases/aliases.toml"
    volumes = {volume["name"]: volume for volume in pod_of(router)["volumes"]}
    assert volumes["aliases"]["configMap"]["name"] == "model-aliases"


def test_prefill_workers_scale_by_the_queue_of_their_model(both):
    scaled = [one for one in of_kind(both["coder"], "ScaledObject") if component(one) == "prefill"]
    (trigger,) = scaled[0]["spec"]["triggers"]
    assert 'namespace="serving",model="coder"' in trigger["metadata"]["query"]
