"""Choices of operators beside pods: the Service, budgets of evictions, quotas, monitors, routes."""

import pytest

from tests.support.rendered_chart import (
    EXTENDED,
    chart,
    component,
    container_of,
    notes,
    of_kind,
    preset,
    render,
    render_tests,
    values_of,
    workloads,
)


def service_of(objects):
    return next(s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("-router"))


def test_service_of_routers_is_plain_by_default():
    service = service_of(render({}))
    assert service["spec"].keys() == {"type", "selector", "ports"}
    assert "annotations" not in service["metadata"]


def test_service_of_routers_has_type_class_and_affinity():
    service = service_of(preset(EXTENDED))
    assert service["metadata"]["annotations"] == {"example.com/scheme": "internal"}
    expected = {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
        "trafficDistribution": "PreferSameZone",
        "sessionAffinity": "ClientIP",
    }
    assert {key: service["spec"][key] for key in expected} == expected
    others = [s for s in of_kind(preset(EXTENDED), "Service") if s is not service]
    assert {s["spec"]["type"] for s in others} == {"ClusterIP"}


def budgets(values):
    found = of_kind(render(values), "PodDisruptionBudget")
    return {component(budget): budget["spec"] for budget in found}


def test_endpoint_picker_has_disruption_budget_when_asked():
    picker = {"enabled": True, "replicas": 2}
    assert "endpoint-picker" not in budgets({"endpointPicker": picker})
    chosen = {**picker, "disruptionBudget": {"enabled": True}}
    assert budgets({"endpointPicker": chosen})["endpoint-picker"]["maxUnavailable"] == 1


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "encode"])
def test_disruption_budget_is_chosen_for_each_role(role):
    values = {"encode": {"replicas": 2}}
    others = budgets(values).keys() - {role}

    def chosen(**budget):
        found = budgets({**values, role: {**values.get(role, {}), "disruptionBudget": budget}})
        assert all(found[other]["maxUnavailable"] == 1 for other in others)
        return found.get(role, {})

    assert chosen(enabled=False) == {}
    assert chosen(maxUnavailable="25%")["maxUnavailable"] == "25%"
    assert "minAvailable" not in chosen(maxUnavailable=2)
    kept = chosen(minAvailable=1)
    assert (kept["minAvailable"], "maxUnavailable" in kept) == (1, False)


def test_notes_name_roles_of_one_pod():
    two = {"replicas": 2}
    assert "One pod alone: prefill, decode." in notes({})
    assert "One pod alone: router." in notes(
        {"router": {"replicas": 1}, "prefill": two, "decode": two}
    )
    assert "One pod alone" not in notes({"prefill": two, "decode": two})
    scaled = {"replicas": 5, "autoscaling": {"enabled": True, "minReplicas": 1}}
    prometheus = {"prometheus": "http://prometheus"}
    values = {"prefill": scaled, "decode": two, "autoscaling": prometheus}
    assert "One pod alone: prefill." in notes(values)


def test_quotas_of_cpus_admit_redis_and_test():
    """A quota of limits.cpu refuses each pod that has none."""
    found = workloads(preset(EXTENDED))["redis"]
    resources = found["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "200m", "memory": "256Mi"},
    }
    pod, *_ = render_tests(values_of(EXTENDED))
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == "500m"
    default = container_of(workloads(render({}))["redis"])["resources"]
    assert default["limits"] == {"memory": "256Mi"}


def endpoints(objects):
    """The only endpoint of each PodMonitor, by component."""
    monitors = of_kind(objects, "PodMonitor")
    return {component(found): found["spec"]["podMetricsEndpoints"][0] for found in monitors}


def test_pod_monitors_relabel_targets_and_metrics():
    plain = endpoints(render({"monitoring": {"podMonitors": True}}))
    assert plain.keys() == {"router", "prefill", "decode"}
    assert all(endpoint.keys() == {"port", "path", "interval"} for endpoint in plain.values())
    found = endpoints(preset(EXTENDED))
    assert found.keys() == {"router", "prefill", "decode", "encode", "endpoint-picker", "redis"}
    monitoring = values_of(EXTENDED)["monitoring"]
    for endpoint in found.values():
        assert endpoint["relabelings"] == monitoring["relabelings"]
        assert endpoint["metricRelabelings"] == monitoring["metricRelabelings"]


def annotations_of_alerts(**monitoring):
    (rules,) = of_kind(render({"monitoring": {"rules": True, **monitoring}}), "PrometheusRule")
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule["annotations"] for rule in found if "alert" in rule}


def test_alerts_lead_to_the_page_that_operators_serve():
    page = "https://docs.example/baton/operations.html"
    for alert, annotations in annotations_of_alerts(runbookUrl=page).items():
        assert annotations["runbook_url"] == f"{page}#{alert.lower()}"
        assert "runbook" not in annotations
    for alert, annotations in annotations_of_alerts().items():
        assert annotations["runbook"] == f"docs/operations.md#{alert.lower()}"
        assert "runbook_url" not in annotations


def test_redis_exporter_is_read_by_scrapers_alone():
    redis = {"existingSecret": "pw", "exporter": {"image": "registry.example/exporter:1"}}
    objects = render({"redis": redis})
    main, exporter = workloads(objects)["redis"]["spec"]["template"]["spec"]["containers"]
    assert exporter["ports"] == [{"name": "metrics", "containerPort": 9121}]
    assert exporter["securityContext"] == main["securityContext"]
    assert main["env"][0] in exporter["env"]  # the password
    (policy,) = [p for p in of_kind(objects, "NetworkPolicy") if component(p) == "redis"]
    (scrape,) = [r for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == 9121]
    assert scrape["from"] == chart().merge_values({})["networkPolicy"]["scrapers"]
    assert endpoints(objects) == {}
    elsewhere = {**redis, "url": "redis://redis.data:6379/0"}
    monitored = {"redis": elsewhere, "monitoring": {"podMonitors": True}}
    assert "redis" not in endpoints(render(monitored))


def test_gateways_connect_by_tls_to_name_of_certificates():
    (policy,) = of_kind(preset(EXTENDED), "BackendTLSPolicy")
    (target,) = policy["spec"]["targetRefs"]
    assert target["name"] == service_of(preset(EXTENDED))["metadata"]["name"]
    validation = policy["spec"]["validation"]
    assert validation["caCertificateRefs"] == [
        {"group": "", "kind": "ConfigMap", "name": "authority"}
    ]
    certificate = next(
        found
        for found in of_kind(render({"tls": {"enabled": True, "certManager": {"issuer": "a"}}}),
                             "Certificate")
        if component(found) == "router"
    )  # fmt: skip
    assert validation["hostname"] in certificate["spec"]["dnsNames"]
    assert of_kind(preset("everything"), "BackendTLSPolicy") == []


def test_http_route_has_timeouts_that_cut_no_stream():
    (plain,), (timed,) = (of_kind(preset(name), "HTTPRoute") for name in ("everything", EXTENDED))
    assert "timeouts" not in plain["spec"]["rules"][0]
    assert timed["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}
