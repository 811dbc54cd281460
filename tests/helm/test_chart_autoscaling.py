"""Autoscaling as operators shape it: by queued requests, with credentials and a fallback."""

import pytest
import yaml

from tests.support.cluster.prometheus import promtool
from tests.support.rendered_chart import EXTENDED, component, of_kind, preset, render

PROMETHEUS = {"prometheus": "http://prometheus:9090"}
SCALED = {"autoscaling": {"enabled": True}}
QUEUED = {"autoscaling": {"enabled": True, "queuedRequests": 8}}


def scalers(objects):
    return {component(found): found["spec"] for found in of_kind(objects, "ScaledObject")}


def trigger_of(spec, kind="prometheus"):
    return next(trigger for trigger in spec["triggers"] if trigger["type"] == kind)


def test_routers_scale_by_cpus_without_keda():
    objects = render({"router": SCALED})
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"][0]["resource"]["name"] == "cpu"
    assert "behavior" not in scaler["spec"]
    assert scalers(objects) == {}


def test_routers_scale_by_queued_requests_and_cpus():
    objects = render({"router": QUEUED, "autoscaling": PROMETHEUS})
    assert of_kind(objects, "HorizontalPodAutoscaler") == []
    spec = scalers(objects)["router"]
    assert spec["scaleTargetRef"]["name"] == "demo-baton-router"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
    assert trigger_of(spec, "cpu")["metadata"] == {"value": "70"}
    queued = trigger_of(spec)
    assert (queued["metricType"], queued["metadata"]["threshold"]) == ("AverageValue", "8")


@pytest.mark.system
def test_query_of_queued_requests_sums_own_routers(tmp_path):
    query = trigger_of(scalers(preset(EXTENDED))["router"])["metadata"]["query"]
    own = 'namespace="serving",pod="demo-baton-router-'
    series = [
        {"series": f'baton_requests_waiting{{{labels},model="m"}}', "values": "6x5"}
        for labels in (f'{own}1"', f'{own}2"', 'namespace="other",pod="demo-baton-router-1"')
    ]
    case = {"expr": query, "eval_time": "4m", "exp_samples": [{"labels": "{}", "value": 12}]}
    file = tmp_path / "queue.test.yaml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [case]}
    file.write_text(yaml.safe_dump({"tests": [test]}))
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_behavior_of_routers_reaches_either_scaler():
    behavior = {"scaleDown": {"selectPolicy": "Disabled"}}
    cpu = {"router": {"autoscaling": {"enabled": True, "behavior": behavior}}}
    (scaler,) = of_kind(render(cpu), "HorizontalPodAutoscaler")
    assert scaler["spec"]["behavior"] == behavior
    cpu["router"]["autoscaling"]["queuedRequests"] = 4
    spec = scalers(render({**cpu, "autoscaling": PROMETHEUS}))["router"]
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == behavior


def test_keda_takes_fallback_polling_behavior_and_triggers():
    plain, changed = (scalers(preset(name))["decode"] for name in ("everything", EXTENDED))
    assert "fallback" not in plain
    assert changed["fallback"] == {"failureThreshold": 3, "replicas": 4}
    assert (plain["pollingInterval"], changed["pollingInterval"]) == (15, 30)
    before, after = (
        spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] for spec in (plain, changed)
    )
    assert after == {**before, "scaleUp": {"stabilizationWindowSeconds": 60}}
    assert [trigger["type"] for trigger in changed["triggers"]] == ["prometheus", "cron"]
    down = {"scaleDown": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]}}
    values = {"autoscaling": {"enabled": True, "behavior": down}}
    spec = scalers(render({"decode": values, "autoscaling": PROMETHEUS}))["decode"]
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == down


def test_last_encode_worker_goes_after_cooldown():
    values = {"enabled": True, "minReplicas": 0, "cooldownPeriod": 60}
    objects = render({"encode": {"autoscaling": values}, "autoscaling": PROMETHEUS})
    assert scalers(objects)["encode"]["cooldownPeriod"] == 60


def test_keda_shows_prometheus_who_it_is():
    (made,) = of_kind(preset(EXTENDED), "TriggerAuthentication")
    references = {(ref["parameter"], ref["key"]) for ref in made["spec"]["secretTargetRef"]}
    assert references == {
        *(("username", "username"), ("password", "password")),
        *(("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")),
    }
    assert {ref["name"] for ref in made["spec"]["secretTargetRef"]} == {"prometheus"}
    found = scalers(preset(EXTENDED))
    assert found.keys() == {"router", "prefill", "decode", "encode"}
    for spec in found.values():
        trigger = trigger_of(spec)
        assert trigger["authenticationRef"] == {"name": made["metadata"]["name"]}
        assert trigger["metadata"]["authModes"] == "basic,tls"


def test_keda_takes_an_existing_trigger_authentication():
    there = {"modes": ["bearer"], "name": "metrics", "kind": "ClusterTriggerAuthentication"}
    objects = render({"decode": SCALED, "autoscaling": {**PROMETHEUS, "authentication": there}})
    assert of_kind(objects, "TriggerAuthentication") == []
    trigger = trigger_of(scalers(objects)["decode"])
    assert trigger["authenticationRef"] == {key: there[key] for key in ("name", "kind")}
    plain = trigger_of(scalers(render({"decode": SCALED, "autoscaling": PROMETHEUS}))["decode"])
    assert not plain.keys() & {"authenticationRef"}
    assert "authModes" not in plain["metadata"]
