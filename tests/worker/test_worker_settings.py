"""Settings of a worker, in combination."""

import pytest

from baton.cli.certs import Authority, write
from baton.errors import FailedPreconditionError, UnavailableError
from baton.worker.role_changes import RoleChanges
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker

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


async def test_worker_refuses_role_that_certificate_does_not_cover(tmp_path):
    authority = Authority()
    roles = {role: authority.issue(role) for role in ("prefill", "worker")}
    write(tmp_path, {"ca": authority.own, **roles})

    def worker_with(certificate: str) -> Worker:
        files = {"cert": f"{certificate}.pem", "key": f"{certificate}.key", "ca": "ca.pem"}
        tls = {f"tls_{of}": str(tmp_path / file) for of, file in files.items()}
        return Worker("prefill", WorkerSettings(worker_id="w", **tls))

    with pytest.raises(FailedPreconditionError, match="for prefill alone; one for worker"):
        await RoleChanges(worker_with("prefill")).set_role("decode")
    # This one may, once it has loaded its model.
    with pytest.raises(UnavailableError, match="not ready yet"):
        await RoleChanges(worker_with("worker")).set_role("decode")
