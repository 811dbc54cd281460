"""Supervision, tried on a router alone, which starts in a second; and on the shared cluster."""

import os
import shutil
import signal
import socket
import urllib.request
from pathlib import Path

import psutil
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.client.client import Client
from baton.errors import DeadlineExceededError, UnavailableError
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e


def router_alone(kind: type[LocalCluster] = LocalCluster, **arguments: object) -> LocalCluster:
    return kind(num_prefill=0, num_decode=0, **arguments)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with what processes run in place of Baton. They are forked by Baton all the same."""
    folder = tmp_path / "path" / "baton"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder / "__main__.py"


def test_local_cluster_starts_serves_and_cleans_up() -> None:
    with router_alone() as cluster:
        (router,) = cluster.processes
        with Client(cluster.address, admin_address=cluster.admin_address) as client:
            assert client.get_model().name == "tiny"
            load = client.get_load()
            assert (load.state, load.phase) == ("starting", "no decode worker is known")
            with pytest.raises(DeadlineExceededError):
                client.generate("a", timeout=0.5).text()
        folder, pids = router.log_path.parent, [router.pid, cluster.redis.pid]
        cluster.check()
    assert not any(map(psutil.pid_exists, pids))
    assert not folder.exists()
    cluster.stop()


def test_check_names_dead_process_and_restart_revives_it() -> None:
    with router_alone() as cluster:
        os.kill(cluster.process("router").pid, signal.SIGKILL)
        wait_until(lambda: not cluster.process("router").is_running)
        with pytest.raises(UnavailableError, match="router was killed by SIGKILL"):
            cluster.check()
        cluster.restart("router")
        cluster.kill("router")
        cluster.check()


def test_start_names_unexpected_error_and_keeps_its_log(program: Path) -> None:
    program.write_text("""try: 1 / 0
except Exception: raise RuntimeError("CUDA is out of memory\\nTry less")""")
    cluster = router_alone()
    with pytest.raises(UnavailableError) as raised:
        cluster.start()
    (router,) = cluster.processes
    sentence = "router failed unexpectedly: RuntimeError: CUDA is out of memory; its log is "
    assert str(raised.value) == f"{sentence}{router.log_path}"
    assert "ZeroDivisionError" in router.log_path.read_text()
    shutil.rmtree(router.log_path.parent)


@pytest.mark.slow
def test_stop_ends_a_suspended_process() -> None:
    with router_alone() as cluster:
        cluster.kill("router", signal.SIGSTOP)
        pid = cluster.process("router").pid
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_start_picks_another_port_when_its_port_is_taken(tmp_path: Path) -> None:
    cluster = router_alone(log_dir=tmp_path)
    with socket.create_server(("127.0.0.1", cluster.process("router").port)), cluster:
        cluster.check()
    assert "is taken" in (tmp_path / "router.log").read_text()


@pytest.mark.slow
def test_start_replaces_only_the_metrics_port_when_taken(tmp_path: Path) -> None:
    cluster = router_alone(log_dir=tmp_path)
    router, address = cluster.process("router"), cluster.address
    with socket.create_server(("127.0.0.1", router.metrics_port)) as other, cluster:
        assert router.metrics_port != other.getsockname()[1]
        assert cluster.address == address
        with urllib.request.urlopen(f"http://{router.metrics_endpoint}/metrics", timeout=5) as told:
            assert b'baton_requests_in_flight{model="tiny"} 0.0' in told.read()


@pytest.mark.nightly
def test_restart_picks_another_port_after_many_starts() -> None:
    with router_alone() as cluster:
        router = cluster.process("router")
        for _ in range(3):
            cluster.kill("router")
            cluster.restart("router")
        cluster.kill("router")
        with socket.create_server(("127.0.0.1", router.admin_port)) as other:
            cluster.restart("router")
            assert router.admin_port != other.getsockname()[1]
        with Client(cluster.admin_address) as client:
            assert client.list_workers() == []


def test_local_cluster_has_no_metrics_endpoint_when_disabled() -> None:
    cluster = router_alone(router_flags={"metrics": False})
    assert cluster.metrics_endpoints == {}
    assert "--no-metrics" in cluster.process("router").command


@pytest.mark.slow
def test_start_fails_when_the_requested_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sentence = f"^router failed: port {port} on 127.0.0.1 is taken; choose another with --port$"
        with pytest.raises(UnavailableError, match=sentence):
            router_alone(port=port).start()


class LingeringCluster(LocalCluster):
    """Goes on after a check only when its router has ended."""

    def check(self) -> None:
        super().check()
        wait_until(lambda: not self.process("router").is_running)


def test_start_fails_when_the_router_ends_after_a_check(program: Path) -> None:
    program.write_text("import time; time.sleep(1)")
    cluster = router_alone(LingeringCluster)
    with pytest.raises(UnavailableError, match="router ended with code 0"):
        cluster.start()


@pytest.mark.slow
def test_start_names_and_stops_processes_not_ready_in_time() -> None:
    cluster = LocalCluster()
    with pytest.raises(DeadlineExceededError, match=r"decode-0.* did not become ready within 0 s"):
        cluster.start(timeout=0)
    assert not any(process.is_running for process in cluster.processes)


def test_process_writes_flags_as_workers_read_them() -> None:
    flags = {"num_blocks": 4, "prefix_caching": False, "reflection": True, "dtype": None}
    process = Process("decode-0", "decode", 1234, flags, admin_port=1235)
    assert process.command[1:] == [
        *("-P", "-m", "baton", "decode-worker", "--host", "127.0.0.1", "--port", "1234"),
        *("--admin-port", "1235"),
        *("--num-blocks", "4", "--no-prefix-caching", "--reflection"),
    ]


def test_process_endpoint_is_loopback_for_wildcard_host() -> None:
    everywhere = Process("router", "router", 1, {"host": "0.0.0.0"}, admin_port=2)
    somewhere = Process("decode-0", "decode", 1, {"host": "10.0.0.7"}, admin_port=2)
    assert everywhere.endpoint == "127.0.0.1:1"
    assert (somewhere.endpoint, somewhere.admin_endpoint) == ("10.0.0.7:1", "10.0.0.7:2")


def test_router_admin_endpoint_is_always_loopback() -> None:
    everywhere = Process("router", "router", 1, {"host": "10.0.0.7"}, admin_port=2)
    assert everywhere.admin_endpoint == "127.0.0.1:2"


def test_free_port_differs_from_ports_given_out() -> None:
    port = free_port(set())
    assert port not in {free_port({port}) for _ in range(100)}


@pytest.mark.slow
def test_local_cluster_serves_several_models() -> None:
    with (
        LocalCluster("tiny,x=shapes", worker_flags={"num_blocks": 64}) as cluster,
        Client(cluster.address) as client,
    ):
        listed = client.list_models().models
        assert [(model.name, model.has_workers) for model in listed] == [
            ("tiny", True),
            ("x", True),
        ]
        names = [process.name for process in cluster.processes]
        assert names == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert client.generate("def", model="shapes").text()


def test_killed_worker_serves_again_under_its_name_after_restart(cluster: LocalCluster) -> None:
    cluster.kill("decode-0")
    cluster.restart("decode-0")
    with Client(cluster.address, admin_address=cluster.admin_address) as client:
        assert client.generate("def main():").text()
        assert {w.id: w.state for w in client.list_workers()} == {
            "prefill-0": "ready",
            "decode-0": "ready",
        }
