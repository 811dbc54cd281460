"""Certificates of the chart, and what processes make of them."""

import json
from base64 import b64decode

import kubernetes_validate
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.rpc.tls import Tls
from baton.serving.grpc.access import ROUTER_NAME, WORKER_NAME, Identity, identity_in
from baton.serving.grpc.certificates import read_certificate
from baton.serving.network_topology import CLUSTER, WORKERS
from tests.support import kube_rules
from tests.support.rendered_chart import (
    NAMESPACE,
    component,
    container_of,
    env_of,
    notes,
    of_kind,
    pod_of,
    processes,
    render,
)

ISSUED = {"enabled": True, "certManager": {"issuer": "baton", "hosts": ["llm.example"]}}
NAMED = {"enabled": True, "existingSecrets": {p: f"{p}-secret" for p in CLUSTER}}
ENCODE = {"replicas": 1}


def certificates(values):
    return {component(found): found["spec"] for found in of_kind(render(values), "Certificate")}


def test_cert_manager_issues_certificate_per_process_and_role():
    made = certificates({"tls": ISSUED, "encode": ENCODE})
    assert made.keys() == set(CLUSTER)
    for process, spec in made.items():
        assert identity_in(spec["uris"]) == Identity(process, None)
        assert {"server auth", "client auth"} <= set(spec["usages"])
    assert all(made[role]["dnsNames"] == [WORKER_NAME] for role in WORKERS)
    names = made["router"]["dnsNames"]
    assert {ROUTER_NAME, "localhost", "llm.example"} <= set(names)
    services = of_kind(render({"tls": ISSUED}), "Service")
    for service in services:
        if component(service) == "router":
            name = service["metadata"]["name"]
            assert {name, f"{name}.{NAMESPACE}", f"{name}.{NAMESPACE}.svc"} <= set(names)


def test_elastic_workers_get_certificate_for_all_roles():
    elastic = {"settings": {"elastic": True}}
    made = certificates({"tls": ISSUED, "router": elastic, "encode": ENCODE})
    assert identity_in(made["router"]["uris"]) == Identity("router", None)
    for role in WORKERS:
        assert identity_in(made[role]["uris"]) == Identity("worker", None)


@pytest.mark.parametrize("tls", [ISSUED, NAMED], ids=["issued", "named"])
def test_pods_mount_only_own_certificate(tls):
    objects = render({"tls": tls, "encode": ENCODE})
    made = {component(c): c["spec"]["secretName"] for c in of_kind(objects, "Certificate")}
    for process, workload in processes(objects).items():
        (volume,) = (v for v in pod_of(workload)["volumes"] if v["name"] == "tls")
        expected = made[process] if made else f"{process}-secret"
        # Readable by its user and its group, which is the pod's.
        assert volume["secret"] == {"secretName": expected, "defaultMode": 0o440}
        (mount,) = (m for m in container_of(workload)["volumeMounts"] if m["name"] == "tls")
        assert mount == {"name": "tls", "mountPath": "/etc/baton/tls", "readOnly": True}
        told = {n: v.get("value") for n, v in env_of(workload).items() if "_TLS_" in n}
        assert told == {
            "BATON_TLS_CERT": "/etc/baton/tls/tls.crt",
            "BATON_TLS_KEY": "/etc/baton/tls/tls.key",
            "BATON_TLS_CA": "/etc/baton/tls/ca.crt",
        }
        assert "BATON_INSECURE" not in env_of(workload)


@pytest.mark.parametrize("release", ["demo", "my-baton-2", "a" * 33 + "-b", "baton" * 8 + "-x"])
def test_baton_certs_makes_the_secrets_of_a_release(release, tmp_path):
    arguments = ["certs", str(tmp_path), "--secrets", NAMESPACE, "--release", release]
    made = CliRunner().invoke(app, arguments)
    assert made.exit_code == 0, made.stderr
    secrets = {found["metadata"]["name"]: found for found in json.loads(made.stdout)["items"]}
    for secret in secrets.values():
        kubernetes_validate.validate(secret, "1.36", strict=True)
        assert secret["metadata"]["namespace"] == NAMESPACE
        assert kube_rules.is_subdomain(secret["metadata"]["name"])
    # The values that the chart is told, and the names under which pods take them.
    given = dict(pair.split("=") for pair in made.stderr.split()[1].split(","))
    assert given.pop("tls.enabled") == "true"
    client = secrets[given.pop("helmTest.clientSecret")]
    names = {path.rpartition(".")[2]: name for path, name in given.items()}
    tls = {"enabled": True, "existingSecrets": names}
    taken = processes(render({"tls": tls, "encode": ENCODE}, release))
    assert taken.keys() == names.keys() == set(CLUSTER)
    for process, workload in taken.items():
        (volume,) = (v for v in pod_of(workload)["volumes"] if v["name"] == "tls")
        secret = secrets[volume["secret"]["secretName"]]
        assert certificate_in(secret, tmp_path).identity.role == process
    assert b64decode(client["data"]["tls.key"]) == (tmp_path / "client.key").read_bytes()
    # As cert-manager makes it.
    issued = render({"tls": ISSUED}, release)
    (router,) = (c for c in of_kind(issued, "Certificate") if component(c) == "router")
    wanted = set(router["spec"]["dnsNames"]) - {"llm.example"}
    assert wanted == certificate_in(secrets[names["router"]], tmp_path).names


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["--secrets", "Bad NS"], "--secrets: is 'Bad NS'"),
        (["--secrets", "llm", "--release", "-x"], "--release: is '-x'"),
        (["--secrets", "llm", "--release", "a" * 54], "at most 53"),
    ],
)
def test_baton_certs_refuses_names_before_it_writes(names, problem, tmp_path):
    made = CliRunner().invoke(app, ["certs", str(tmp_path / "made"), *names])
    assert (made.exit_code, problem in made.stderr) == (1, True), made.stderr
    assert not (tmp_path / "made").exists()


def certificate_in(secret, folder):
    """Reads the certificate of a secret as the process does that mounts it."""
    mounted = folder / secret["metadata"]["name"]
    mounted.mkdir(exist_ok=True)
    for key, value in secret["data"].items():
        (mounted / key).write_bytes(b64decode(value))
    return read_certificate(Tls(mounted / "ca.crt", mounted / "tls.crt", mounted / "tls.key"))


def test_client_auth_setting_reaches_only_router():
    for asked in ("certificate", "token"):
        tls = {**ISSUED, "clientAuth": asked}
        objects = render({"tls": tls, "router": {"tenantsSecret": "tenants"}})
        told = {p: env_of(workload) for p, workload in processes(objects).items()}
        assert told["router"]["BATON_CLIENT_AUTH"]["value"] == asked
        assert "BATON_CLIENT_AUTH" not in told["decode"]


def test_cert_manager_skips_process_with_existing_secret():
    both = {**ISSUED, "existingSecrets": {"router": "mine"}}
    assert certificates({"tls": both}).keys() == {"prefill", "decode"}


def test_service_ports_name_app_protocol():
    for tls, said in ((ISSUED, {"https"}), ({}, {"kubernetes.io/h2c", "http"})):
        services = of_kind(render({"tls": tls, "router": {"http": True}}), "Service")
        ports = [p for s in services if component(s) != "redis" for p in s["spec"]["ports"]]
        assert {port["appProtocol"] for port in ports} == said


def test_processes_are_set_insecure_without_tls():
    for workload in processes(render({"encode": ENCODE})).values():
        variables = env_of(workload)
        assert variables["BATON_INSECURE"]["value"] == "true"
        assert not [name for name in variables if "_TLS_" in name]


def test_notes_name_ports_and_tls_variables_of_commands():
    assert "BATON_TLS" not in notes({})
    assert "deployment/demo-baton-router 50051 50053" in notes({})
    assert "127.0.0.1:50051" in notes({})
    assert "--admin 127.0.0.1:50053" in notes({})
    said = notes({"tls": ISSUED})
    # Which the router's certificate is for, as it is not for an address.
    assert "127.0.0.1" not in said
    assert "localhost:50051" in said
    for name in ("BATON_TLS_CA", "BATON_TLS_CERT", "BATON_TLS_KEY"):
        assert name in said
    assert "BATON_TOKEN" not in said
    token = {"tls": {**ISSUED, "clientAuth": "token"}, "router": {"tenantsSecret": "tenants"}}
    assert "BATON_TOKEN" in notes(token)
