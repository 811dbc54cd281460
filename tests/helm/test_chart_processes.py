"""The commands, variables and probes of the chart, run as processes on loopback."""

import json
import math
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import Client, SamplingParams
from baton.cli.certs import Authority, write
from baton.cli.local.ports import HOST, free_port
from baton.cluster.parent_death import dying_with_parent
from baton.cluster.redis.address import with_password
from baton.cluster.redis.client import check_answers
from baton.cluster.redis.embedded import _server_binary
from baton.errors import UnavailableError
from baton.rpc.tls import Tls
from baton.serving.grpc.access import identity_in
from tests.support.gguf.caches import own_cache
from tests.support.rendered_chart import (
    ROOT,
    component,
    container_of,
    env_of,
    of_kind,
    pod_of,
    render,
    render_tests,
    values_of,
    workloads,
)
from tests.support.waiting import wait_until

# Characters that mean something in a URL, to a shell, to Redis' configuration or to Kubernetes.
PASSWORDS = (
    "@:/%#?&=+,; '\"",
    "%40%zz",
    "--save",
    "$(POD_IP) $$ `id` \\n\\",
    "pässwörd-密码",
    "plain",
)

KINDS = ("startup", "readiness", "liveness")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def cores(quantity) -> int:
    """Returns a quantity of CPUs as Kubernetes tells a container: rounded up."""
    text = str(quantity)
    return math.ceil(float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1))


class Pod:
    """One pod of a workload, as a process: its container's command with its variables, but that it
    listens on loopback, on ports and in folders of the test's."""

    def __init__(self, workload, folder: Path, taken: set[int], redis_url: str = "") -> None:
        self.spec, self.container = pod_of(workload), container_of(workload)
        self.folder = folder
        # By name of the container's port.
        self.ports = {}
        for port in self.container["ports"]:
            self.ports[port["name"]] = free_port(taken)
            taken.add(self.ports[port["name"]])
        self._env = self._variables(env_of(workload), redis_url)
        self.process: subprocess.Popen[bytes] | None = None

    def _variables(self, variables, redis_url):
        requests = self.container["resources"]["requests"]
        facts = {
            "status.podIP": HOST,
            "metadata.name": self._command[-1],
            "requests.cpu": str(cores(requests["cpu"])),
        }
        values: dict[str, str] = {}
        for name, variable in variables.items():
            if "valueFrom" in variable:
                (source,) = variable["valueFrom"].values()
                value = facts[source.get("fieldPath") or source["resource"]]
            else:
                value = variable["value"]
            for known in values:
                value = value.replace(f"$({known})", values[known])
            values[name] = value
        for port in self.container["ports"]:
            for name, value in values.items():
                if name.endswith("PORT") and value == str(port["containerPort"]):
                    values[name] = str(self.ports[port["name"]])
        for mount in self.container["volumeMounts"]:
            here = self.folder / mount["name"]
            here.mkdir(parents=True, exist_ok=True)
            for name, value in values.items():
                if value.startswith(mount["mountPath"]):
                    values[name] = f"{here}{value.removeprefix(mount['mountPath'])}"
        return {**values, "BATON_HOST": HOST, "BATON_REDIS_URL": redis_url}

    @contextmanager
    def running(self):
        program = {
            "baton": [sys.executable, "-m", "baton"],
            "redis-server": [str(_server_binary())],
        }
        command, *arguments = self._command
        path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if not (self.folder / "cache" / "baton").exists():
            own_cache(self.folder)  # with the libraries that all tests share
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                dying_with_parent([*program[command], *self._placed(arguments)]),
                cwd=self.folder,
                env={**path, **self._env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield self
        finally:
            self.process.kill()
            self.process.wait()
            # Which pytest shows of a failed test.
            print((self.folder / "log").read_text(errors="replace")[-2000:])

    @property
    def _command(self) -> list[str]:
        """Baton's images have an init as their entrypoint, which runs the arguments."""
        return [*self.container.get("command", ()), *self.container.get("args", ())]

    def _placed(self, arguments):
        """Redis has no variables."""
        known = {str(p["containerPort"]): str(self.ports[p["name"]]) for p in
                 self.container["ports"]}  # fmt: skip
        known |= {m["mountPath"]: str(self.folder / m["name"]) for m in
                  self.container["volumeMounts"]}  # fmt: skip
        return [known.get(argument, argument) for argument in arguments]

    def passes(self, kind: str) -> bool:
        """Asks a probe as the kubelet does: SERVING, or a status below 400, is all that counts."""
        probe = self.container[f"{kind}Probe"]
        timeout = probe["timeoutSeconds"]
        if asked := probe.get("httpGet"):
            url = f"http://{HOST}:{self.ports[asked['port']]}{asked['path']}"
            with suppress(OSError), urllib.request.urlopen(url, timeout=timeout) as answer:
                return bool(200 <= answer.status < 400)
            return False
        request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        address = f"{HOST}:{self.ports['grpc']}"
        with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
        return False

    def wait_started(self) -> None:
        probe = self.container["startupProbe"]
        within = probe["periodSeconds"] * probe["failureThreshold"]
        assert self.process is not None
        wait_until(
            lambda: self.process.poll() is not None or self.passes("startup"), within, interval=0.2
        )
        assert self.process.poll() is None


def issue(objects, folder: Path) -> Tls:
    """Puts into each pod's folder what cert-manager would into its secret; returns an admin's."""
    authority = Authority()
    for certificate in of_kind(objects, "Certificate"):
        spec = certificate["spec"]
        role = identity_in(spec["uris"]).role
        issued = authority.issue(role, hosts=spec["dnsNames"])
        secret = folder / component(certificate) / "tls"
        secret.mkdir(parents=True)
        files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.own.cert}
        for name, content in files.items():
            (secret / name).write_bytes(content)
    own = folder / "own"
    write(own, {"ca": authority.own, "admin": authority.issue("admin")})
    return Tls(own / "ca.pem", own / "admin.pem", own / "admin.key")


def context_of(tls: Tls | None) -> ssl.SSLContext | None:
    """Returns the TLS context of a program that asks by HTTP."""
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def assert_helm_test_passes(values, redis_url: str, address: str, folder: Path) -> None:
    """Runs the command of the pod of `helm test` with its variables and under its memory limit, as
    the client in `folder`, without the packages that the router's image lacks."""
    pod, *_ = render_tests({**values, "helmTest": {"clientSecret": "client"}})
    (container,) = pod["spec"]["containers"]
    variables = {v["name"]: v["value"] for v in container["env"]}
    for name, value in variables.items():
        if value.startswith("/etc/baton/tls/"):
            file = {"ca.crt": "ca.pem", "tls.crt": "admin.pem", "tls.key": "admin.key"}
            variables[name] = str(folder / "own" / file[Path(value).name])
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    (folder / "memory.max").write_text(f"{int(limit.removesuffix('Mi')) * 2**20}\n")
    here = {"BATON_REDIS_URL": redis_url, "BATON_ADDRESS": address, "HOME": str(folder)}
    assert here.keys() <= variables.keys()
    paths = (ROOT / "tests" / "support" / "router_image_site", ROOT, os.environ.get("PYTHONPATH"))
    image = {"POD_CGROUP": str(folder), "PYTHONPATH": ":".join(str(path or "") for path in paths)}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tested = subprocess.run(
        [*container["command"], *container["args"]],
        env={**variables, **here, **image, "PATH": programs},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    print(tested.stdout, tested.stderr)
    assert tested.returncode == 0
    assert '"prefill_worker": "prefill-worker"' in tested.stdout
    assert "no faults" in tested.stdout


@pytest.mark.parametrize("password", PASSWORDS)
def test_trial_redis_and_processes_agree_on_any_password(password, tmp_path):
    objects = workloads(render({"redis": {"existingSecret": "redis-password"}}))
    args = container_of(objects["redis"])["args"]
    # As the kubelet fills in variables: once.
    args = [password if arg == "$(REDIS_PASSWORD)" else arg for arg in args]
    port = free_port(set())
    placed = {"6379": str(port), "/data": str(tmp_path)}
    command = [str(_server_binary()), *(placed.get(arg, arg) for arg in args)]
    with subprocess.Popen(dying_with_parent(command), stdout=subprocess.DEVNULL) as server:
        try:
            for process in ("router", "prefill", "decode"):
                variables = env_of(objects[process])
                secret = variables["BATON_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
                assert secret == {"name": "redis-password", "key": "password"}
                url = variables["BATON_REDIS_URL"]["value"].replace(
                    "demo-baton-redis:6379", f"{HOST}:{port}"
                )
                wait_until(
                    lambda url=url: check_answers(with_password(url, password)) is not None,
                    ignoring=(UnavailableError,),
                )
                with pytest.raises(UnavailableError):
                    check_answers(with_password(url, f"{password}x"))
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_encrypted",
    [
        pytest.param(False, id="in-the-clear"),
        pytest.param(True, id="over-tls", marks=pytest.mark.nightly),
    ],
)
def test_demo_chart_serves_passes_probes_and_drains(is_encrypted, tmp_path):
    tls = {"tls": {"enabled": True, "certManager": {"issuer": "baton"}}} if is_encrypted else {}
    values = {**values_of("values-cpu-demo"), **tls}
    objects = render(values)
    demo = workloads(objects)
    own = issue(objects, tmp_path) if is_encrypted else None
    taken: set[int] = set()
    with ExitStack() as stack:

        def start(name, url=""):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            return stack.enter_context(Pod(demo[name], folder, taken, url).running())

        store = start("redis")
        url = f"redis://{HOST}:{store.ports['redis']}/0"
        with redis.Redis.from_url(url) as client:
            wait_until(client.ping, ignoring=(redis.ConnectionError,))
        pods = [start(name, url) for name in ("prefill", "decode", "router")]
        for pod in pods:
            pod.wait_started()
        router = pods[-1]
        ports = (router.ports[name] for name in ("grpc", "admin"))
        # As a port-forward has it.
        address, admin_address = (f"localhost:{port}" for port in ports)
        with Client(address, admin_address=admin_address, tls=own) as client:
            wait_until(lambda: [w.state for w in client.list_workers()] == ["ready"] * 2, 30.0)
            assert {w.id for w in client.list_workers()} == {"prefill-worker", "decode-worker"}
            generation = client.generate("import os\n", SamplingParams(max_tokens=8))
            assert generation.text()
        assert_helm_test_passes(values, url, address, tmp_path)
        request = urllib.request.Request(
            f"{'https' if is_encrypted else 'http'}://localhost:{router.ports['http']}/v1/completions",
            json.dumps({"model": "tiny", "prompt": "import os\n", "max_tokens": 8}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60, context=context_of(own)) as answer:
            assert json.load(answer)["choices"][0]["text"]
        for pod in pods:
            kinds = {key for kind in KINDS for key in pod.container[f"{kind}Probe"]}
            assert ("httpGet" in kinds, "grpc" in kinds) == (is_encrypted, not is_encrypted)
            assert pod.passes("liveness")
            assert pod.passes("readiness")
            metrics = f"http://{HOST}:{pod.ports['metrics']}/metrics"
            with urllib.request.urlopen(metrics, timeout=10) as answer:
                text = answer.read()
            assert b"process_resident_memory_bytes" in text
            if pod is pods[1]:  # decode, by the fastest connector of processes on one network
                assert b'baton_kv_transfer_bytes_total{connector="shm"' in text
        for pod in reversed(pods):
            assert pod.process is not None
            pod.process.send_signal(signal.SIGTERM)
            assert pod.process.wait(pod.spec["terminationGracePeriodSeconds"]) == 0
