"""Workers of one model in unlike dtypes, as auto chooses them on CPUs of unlike kinds: they do not
pair, and each place that reports it names both dtypes and the setting."""

from collections.abc import Iterator

import pytest

from baton.cli.checks.cluster import cluster as checked
from baton.cli.checks.finding import Level
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from tests.support.cluster.worker_beside import worker_beside

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def narrow(cluster: LocalCluster) -> Iterator[str]:
    """A decode worker in bfloat16 beside the shape `single`, which is in float32."""
    with worker_beside(cluster, "decode", dtype="bfloat16") as worker:
        yield worker.worker_id


def test_router_logs_dtypes_of_workers_that_do_not_pair(cluster, narrow):
    log = cluster.process("router").log_path.read_text()
    lines = [line for line in log.splitlines() if "serve different weights" in line]
    (line,) = [line for line in lines if "Their KV dtypes differ (" in line]
    assert "float32: " in line
    assert f"bfloat16: {narrow}" in line
    assert "start all with the same --dtype" in line


def test_doctor_names_dtypes_of_workers_that_do_not_pair(cluster, narrow):
    (found,) = [f for f in checked(cluster.admin_address, None, "") if f.subject == "dtype"]
    assert found.level is Level.FAULT
    assert found.text.endswith(f"float32, but {narrow}: bfloat16")
    assert "start all with the same --dtype" in found.advice


def test_explanation_names_dtype_that_has_no_partner(cluster, narrow):
    with Client(cluster.address, admin_address=cluster.admin_address) as client:
        reason = client.explain("Hello").reason
    assert f"Without a partner of the same KV dtype: {narrow} (bfloat16); start all with" in reason
