"""What a worker makes of its settings together."""

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
def test_nixl_takes_bytes_beyond_loopback_past_tls_only_where_it_is_asked_for(settings, may):
    problem = WorkerSettings(**settings).nixl_problem
    assert (problem == "") == may
    assert may or "--kv-connector nixl" in problem
