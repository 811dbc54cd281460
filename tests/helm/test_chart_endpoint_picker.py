"""Endpoint picker of the chart: its settings, its ports and the InferencePool."""

import pytest

from baton.serving.network_topology import PORTS
from baton.settings.loading import load
from baton_picker.settings import PickerSettings
from tests.support.rendered_chart import (
    EVERYTHING,
    component,
    container_of,
    env_of,
    of_kind,
    pod_of,
    preset,
    render,
    workloads,
)

PICKER = "endpoint-picker"


@pytest.fixture
def picker():
    return workloads(preset(EVERYTHING))[PICKER]


def test_chart_makes_no_endpoint_picker_by_default():
    assert PICKER not in {component(found) for found in preset("values")}
    assert of_kind(preset("values"), "InferencePool") == []


def test_endpoint_picker_gets_its_settings_and_no_redis(picker, monkeypatch):
    # Not a command, which would replace the init of the image.
    assert "command" not in container_of(picker)
    command, picks, *flags = container_of(picker)["args"]
    assert (command, picks) == ("baton", "picker")
    told = env_of(picker)
    assert not {"BATON_REDIS_URL", "REDIS_PASSWORD"} & told.keys()
    for name, variable in told.items():
        monkeypatch.setenv(name, variable.get("value", "10.0.0.1"))
    settings = load(PickerSettings, flags)
    assert settings.endpoints == "models.serving.svc:8000,10.1.2.3:8001"
    assert settings.max_in_flight == 64
    assert pod_of(picker)["terminationGracePeriodSeconds"] > settings.drain_timeout_s


def test_endpoint_picker_has_the_ports_of_its_process(picker):
    ports = {one["name"] for one in container_of(picker)["ports"]}
    assert ports == {port for port, (_, of) in PORTS.items() if PICKER in of}


def test_inference_pool_refers_to_the_service_of_the_picker():
    (pool,) = of_kind(preset(EVERYTHING), "InferencePool")
    services = {s["metadata"]["name"]: s["spec"]["ports"] for s in
                of_kind(preset(EVERYTHING), "Service")}  # fmt: skip
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["port"]["number"] in {p["port"] for p in services[reference["name"]]}
    assert reference["failureMode"] == "FailClose"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"inferencePool": {"name": "models"}}, "selector"),
        ({"inferencePool": {"name": "models", "selector": {"a": "b"}, "failureMode": "Open"}},
         "failureMode"),
        ({"endpoints": ["models"]}, "endpoints"),
        ({"endpointPorts": []}, "endpointPorts"),
        ({"settings": {"endpoints": "a:1"}}, "endpoints"),
    ],
    ids=["pool of all pods", "failure mode", "no port", "no ports", "endpoints twice"],
)  # fmt: skip
def test_chart_refuses_endpoint_picker_values_by_name(values, named):
    with pytest.raises(Exception, match=named):
        render({"endpointPicker": {"enabled": True, **values}})
