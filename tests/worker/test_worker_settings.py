"""Settings of a worker, in combination."""

import pytest

from baton.worker.settings import WorkerSettings

FILES = {"tls_cert": "a.pem", "tls_key": "a.key", "tls_ca": "ca.pem"}


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({"host": "10.0.0.1", "insecure": True}, True),
        ({"host": "10.0.0.1", **FILES}, False),
        ({"host": "10.0.0.1", "kv_connector": "grpc", **FILES}, False),
        ({"host": "10.0.0.1", "kv_connector": "nixl", **FILES}, True),
        ({"host": "127.0.0.1", **FILES}, True),
        ({"host": "127.0.0.1", "nixl_devices": "eth0", **FILES}, False),
    ],
)
def test_nixl_bypasses_tls_beyond_loopback_only_when_asked(settings, may):
    problem = WorkerSettings(**settings).nixl_problem
    assert (problem == "") == may
    assert may or "--kv-connector nixl" in problem


def test_rdma_is_refused_for_connectors_without_it():
    for connector in ("auto", "grpc", "shm", "cuda-ipc"):
        with pytest.raises(ValueError, match=f"'{connector}' with --require-rdma; expected nixl"):
            WorkerSettings(require_rdma=True, kv_connector=connector)
    assert WorkerSettings(require_rdma=True, kv_connector="nixl").require_rdma


@pytest.mark.parametrize(
    ("settings", "probes"),
    [
        ({"kv_connector": "nixl"}, True),
        ({"kv_connector": "grpc", "host": "10.0.0.1", "insecure": True}, False),
        ({"host": "10.0.0.1", "insecure": True}, True),
        ({"host": "10.0.0.1", **FILES}, False),
        ({}, False),
    ],
)
def test_transport_of_nixl_is_found_where_it_may_be_used(settings, probes):
    assert WorkerSettings(**settings).probes_nixl == probes
