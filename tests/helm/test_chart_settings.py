"""Settings that the chart passes to processes, and the time limits it sets them."""

import json

import pytest
import yaml

from baton.serving.network_topology import WORKERS
from baton.serving.server import LIVENESS, READINESS
from baton.serving.telemetry.serving import CHECKS
from baton.settings.loading import load
from baton_decode_worker.settings import DecodeSettings
from baton_router.settings import RouterSettings
from tests.support.cluster.prometheus import promtool
from tests.support.rendered_chart import (
    CHART,
    EVERYTHING,
    PRESETS,
    ROOT,
    component,
    container_of,
    env_of,
    merged,
    of_kind,
    pod_of,
    preset,
    processes,
    render,
    values_of,
    workloads,
)

# Defaults of processes that the chart replaces: addresses, ports and names of pods; a plain network
# (policies close it), logs for collectors, drains as long as leases, and sizes of a CPU pod and of
# what it keeps.
REPLACED = {
    *("host", "advertise_host", "port", "admin_port", "kv_port", "metrics_port", "worker_id"),
    *("insecure", "redis_url", "log_format", "drain_timeout_s"),
    *("device", "kv_cache_bytes", "num_threads", "packed_weights_bytes"),
}
# Every worker has those of all roles.
SETTINGS = {"router": RouterSettings, **dict.fromkeys(WORKERS, DecodeSettings)}
MIB = 2**20


def told(objects, process):
    """The variables as a container has them whose pod has this name and address."""
    facts = {"POD_IP": "10.0.0.1", "POD_NAME": f"{process}-0", "BATON_NUM_THREADS": "2"}
    values = {}
    for name, variable in env_of(workloads(objects)[process]).items():
        value = variable.get("value", facts.get(name, "secret"))
        for known in values:
            value = value.replace(f"$({known})", values[known])
        values[name] = value
    return values


def understood(objects, process, monkeypatch):
    """The settings that a process makes of its variables."""
    with monkeypatch.context() as patched:
        for name, value in told(objects, process).items():
            patched.setenv(name, value)
        return load(SETTINGS[process], [])


@pytest.mark.parametrize(
    ("name", "process"),
    [(name, process) for name in PRESETS for process in processes(preset(name))],
)
def test_chart_variables_are_valid_settings(name, process, monkeypatch):
    objects = preset(name)
    known = {f"BATON_{field.upper()}" for field in SETTINGS[process].model_fields}
    ours = {v for v in told(objects, process) if v.startswith("BATON_")}
    assert ours <= known
    settings = understood(objects, process, monkeypatch)
    assert settings.host == "::"
    assert settings.advertise_host == "10.0.0.1"
    assert settings.insecure == (settings.tls is None)
    mounted = {m["mountPath"] for m in container_of(workloads(objects)[process])["volumeMounts"]}
    assert ("/etc/baton/tls" in mounted) == (settings.tls is not None)


@pytest.mark.parametrize("process", ["router", "prefill", "decode"])
def test_chart_defaults_are_those_of_processes(process, monkeypatch):
    settings = understood(render({}), process, monkeypatch)
    fields = type(settings).model_fields.items()
    assert {name for name, f in fields if getattr(settings, name) != f.default} <= REPLACED


def test_chart_values_reach_settings_of_processes(monkeypatch):
    router = understood(preset(EVERYTHING), "router", monkeypatch)
    assert router.placement == "least-loaded"
    assert router.max_prompt_bytes == 2 * MIB
    assert router.share_prefixes
    assert router.redis_url == "redis://demo-baton-redis:6379/0"
    assert router.redis_password == "secret"
    decode = understood(preset(EVERYTHING), "decode", monkeypatch)
    assert (decode.max_num_seqs, decode.gpu_memory_utilization) == (8, 0.85)
    assert (decode.kv_cache_bytes, decode.num_threads, decode.device) == (512 * MIB, 2, "cpu")
    assert decode.socket_dir == "/run/baton"
    prefill = understood(preset(EVERYTHING), "prefill", monkeypatch)
    assert (prefill.kv_cache_bytes, prefill.device) == (None, "cuda")
    assert prefill.worker_id == "prefill-0"


@pytest.mark.parametrize("name", PRESETS)
def test_chart_gives_all_roles_same_pairing_settings(name, monkeypatch):
    """A release cannot be told to have workers that do not pair."""
    fields = ("model", "dtype", "kv_cache_dtype", "block_size", "kv_port", "kv_connector")
    roles = processes(preset(name)).keys() - {"router"}
    workers = [understood(preset(name), role, monkeypatch) for role in roles]
    assert len({tuple(getattr(one, field) for field in fields) for one in workers}) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_pod_grace_period_covers_drain_and_drain_covers_lease(name, monkeypatch):
    for process, workload in processes(preset(name)).items():
        settings = understood(preset(name), process, monkeypatch)
        grace = pod_of(workload)["terminationGracePeriodSeconds"]
        stop = container_of(workload).get("lifecycle", {}).get("preStop", {})
        assert grace - stop.get("sleep", {}).get("seconds", 0) >= settings.drain_timeout_s + 10
        assert ("sleep" in stop) == (process == "router")
        if process != "router":
            assert settings.drain_timeout_s >= settings.lease_timeout_s


def asked_by(probe):
    """Returns a probe's protocol, and what it asks for. The kubelet speaks no gRPC over TLS."""
    if "grpc" in probe:
        return "grpc", probe["grpc"]["service"]
    assert probe["httpGet"].keys() == {"port", "path"}
    assert probe["httpGet"]["port"] == "metrics"
    return "http", CHECKS[probe["httpGet"]["path"]]


@pytest.mark.parametrize("name", PRESETS)
def test_probes_name_their_service_and_wait_for_model_load(name):
    values = merged(values_of(name))
    for process, workload in processes(preset(name)).items():
        container = container_of(workload)
        asked = {kind: asked_by(container[f"{kind}Probe"]) for kind in
                 ("startup", "readiness", "liveness")}  # fmt: skip
        way = "http" if values["tls"]["enabled"] else "grpc"
        assert asked == {
            # A router is not restarted for want of workers, which its readiness needs.
            "startup": (way, LIVENESS if process == "router" else READINESS),
            "readiness": (way, READINESS),
            "liveness": (way, LIVENESS),
        }
        startup = container["startupProbe"]
        seconds = startup["periodSeconds"] * startup["failureThreshold"]
        assert seconds >= values[process]["startupSeconds"]
        for waiting in (process, "router"):
            deployment = workloads(preset(name))[waiting]["spec"]
            assert deployment["progressDeadlineSeconds"] > seconds


def test_router_startup_window_is_a_value():
    container = container_of(workloads(render({"router": {"startupSeconds": 901}}))["router"])
    startup = container["startupProbe"]
    assert 901 <= startup["periodSeconds"] * startup["failureThreshold"] < 905


def test_shared_memory_pools_fit_into_memory_of_pods(monkeypatch):
    for name in PRESETS:
        for process, workload in processes(preset(name)).items():
            if process == "router":
                continue
            settings = understood(preset(name), process, monkeypatch)
            resources = container_of(workload)["resources"]
            if settings.kv_cache_bytes is None:
                assert resources["limits"]["nvidia.com/gpu"] == 1
            else:
                limit = resources["limits"]["memory"]
                held = settings.kv_cache_bytes + settings.swap_bytes
                assert int(limit.removesuffix("Gi")) * 2**30 >= held + 2**30


@pytest.mark.parametrize(
    "cpu",
    [
        {"requests": {"cpu": "500m"}, "limits": {"cpu": 2}},
        {"requests": {"cpu": 2}, "limits": {"cpu": None}},
        {"requests": {"cpu": None}, "limits": {"cpu": 2}},  # which Kubernetes takes for the request
    ],
    ids=["less than its limit", "no limit", "a limit alone"],
)
def test_threads_follow_the_request_of_cpus(cpu):
    for objects in (render({"decode": {"resources": cpu}}), preset("values-cpu-demo")):
        threads = env_of(workloads(objects)["decode"])["BATON_NUM_THREADS"]["valueFrom"]
        wanted = {"containerName": "worker", "resource": "requests.cpu"}
        assert threads == {"resourceFieldRef": wanted}


def test_threads_are_left_to_worker_without_cpus_or_by_setting():
    for nothing in (None, 0, "0"):
        none = {"resources": {"requests": {"cpu": nothing}, "limits": {"cpu": None}}}
        variables = env_of(workloads(render({"decode": none}))["decode"])
        assert "BATON_NUM_THREADS" not in variables
    variables = env_of(workloads(render({"decode": {"settings": {"num_threads": 3}}}))["decode"])
    assert variables["BATON_NUM_THREADS"] == {"name": "BATON_NUM_THREADS", "value": "3"}


def test_processes_listen_on_ipv6_and_ipv4():
    for process, workload in processes(render({"encode": {"replicas": 1}})).items():
        assert env_of(workload)["BATON_HOST"]["value"] == "::", process


def test_probes_survive_a_node_without_a_free_core():
    """Redis as the others: the kubelet's own limits are 1 s and 3 tries."""
    for process, workload in workloads(preset(EVERYTHING)).items():
        liveness = container_of(workload)["livenessProbe"]
        assert (liveness["timeoutSeconds"], liveness["failureThreshold"]) == (5, 6), process
        assert container_of(workload)["readinessProbe"]["timeoutSeconds"] == 5, process


def test_chart_takes_every_shipped_model():
    shipped = {path.parent.name for path in (ROOT / "baton" / "models").glob("*/config.json")}
    schema = json.loads((CHART / "values.schema.json").read_text())
    (names,) = (
        rule["then"]["properties"]["name"]["enum"]
        for rule in schema["properties"]["model"]["allOf"]
        if rule["if"]["properties"]["source"] == {"const": "shipped"}
    )
    assert set(names) == shipped
    for name in names:
        values = {"model": {"name": name}, "encode": {"replicas": 1}}
        for workload in processes(render(values)).values():
            assert env_of(workload)["BATON_MODEL"]["value"] == name


def test_memory_limits_tell_decimal_from_binary_quantities():
    requests = {"memory": "1Gi"}
    limits = {"requests": requests, "limits": {"memory": "1610M"}}
    with pytest.raises(Exception, match=r"decode\.resources\.limits\.memory: 1610M"):
        render({"decode": {"resources": limits}})  # 512Mi and 1Gi are 1610.6 M
    render({"decode": {"resources": {"requests": requests, "limits": {"memory": "1611M"}}}})


def queries():
    return {
        component(scaler): scaler["spec"]["triggers"][0]["metadata"]
        for scaler in of_kind(preset(EVERYTHING), "ScaledObject")
    }


@pytest.mark.system
def test_autoscaler_queries_return_load_of_own_release(tmp_path):
    """Queries read the series of this release and its model: the times prompts wait, and the blocks
    held."""
    series = []

    def has(name, values, **labels):
        inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
        series.append({"series": f"{name}{{{inside}}}", "values": values})

    bucket, count = "baton_prefill_queue_seconds_bucket", "baton_prefill_queue_seconds_count"
    pod = {"namespace": "serving", "pod": "demo-baton-router-1"}
    router = {**pod, "model": "qwen"}
    # None for five minutes; then 80 of 100 in 0.5 s, and the others in 1 s.
    for le, growth in (("0.5", 80), ("1.0", 100), ("+Inf", 100)):
        has(bucket, f"0x5 0+{growth}x10", le=le, **router)
        has(bucket, "0+100x15", le=le, namespace="serving", pod="other-baton-router-1")
        has(bucket, "0+100x15", le=le, **pod, model="other")
    has(count, "0x5 0+100x10", **router)
    for state, blocks in (("held", 60), ("cached", 20), ("free", 20)):
        has("baton_kv_blocks", f"{blocks}x15", state=state, namespace="serving",
            pod="demo-baton-decode-1")  # fmt: skip
        has("baton_kv_blocks", "50x15", state=state, namespace="serving", pod="demo-baton-prefill")
    asked = {role: metadata["query"] for role, metadata in queries().items()}
    # Two routers see the same demand, but not at the same moment.
    for pod_name, pressure in (("1", 0.4), ("2", 0.6)):
        of = {"namespace": "serving", "pod": f"demo-baton-router-{pod_name}", "model": "qwen"}
        has("baton_pool_pressure", f"{pressure}x15", role="encode", **of)
        has("baton_pool_pressure", "5x15", role="prefill", **of)
        has("baton_pool_pressure", "5x15", role="encode", **{**of, "model": "other"})
    wanted = (
        ("encode", "14m", 0.6),
        ("prefill", "4m", 0),
        ("prefill", "14m", 0.75),
        ("decode", "14m", 0.6),
    )
    cases = [
        {"expr": asked[role], "eval_time": when, "exp_samples": [{"labels": "{}", "value": value}]}
        for role, when, value in wanted
    ]
    nothing = [{"expr": query, "eval_time": "1m", "exp_samples": []} for query in asked.values()]
    file = tmp_path / "scaling.test.yaml"
    tests = [
        {"interval": "1m", "input_series": series, "promql_expr_test": cases},
        {"interval": "1m", "input_series": [], "promql_expr_test": nothing},
    ]
    file.write_text(yaml.safe_dump({"tests": tests}))
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert [m["threshold"] for m in queries().values()] == ["0.5", "0.5", "0.7"]
