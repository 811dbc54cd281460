"""Settings of a worker, in combination."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.cli.certs import Authority, write
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from baton.models import locate
from baton.v1 import admin_pb2 as pb
from baton.worker.admin import WorkerAdmin
from baton.worker.process import assemble
from baton.worker.role_changes import RoleChanges
from baton.worker.roles import settings_class
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_refuses_encoder_only_in_other_roles(role):
    with pytest.raises(InvalidArgumentError, match=f"for a {role} worker.* expected an encode"):
        Worker(role, WorkerSettings(worker_id="w", encoder_only=True))


async def test_worker_is_starting_until_all_of_it_is_set_up() -> None:
    worker = assemble("decode", settings_class()(worker_id="w", device="cpu", num_blocks=8))
    admin, seen = WorkerAdmin(worker), []

    async def look(_stack: AsyncExitStack) -> None:
        load = await admin.GetLoad(pb.GetLoadRequest(), None)
        seen.append((load.state, load.phase, load.progress))

    worker.on_load(look)
    async with AsyncExitStack() as stack:
        await worker.listen(stack)
        await look(stack)
        await worker.load(stack)
        await look(stack)
    assert seen == [
        (pb.WORKER_STATE_STARTING, "starting", 0.0),
        (pb.WORKER_STATE_STARTING, "opening connections", 1.0),
        (pb.WORKER_STATE_READY, "", 1.0),
    ]
    size = (Path(locate("tiny")) / "model.safetensors").stat().st_size
    assert (worker.num_loaded_bytes, worker.num_weight_bytes) == (size, size)
