"""Process of a router that is an endpoint picker."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.local.ports import free_port
from tests.support.waiting import wait_until

HOST = "127.0.0.1"


@contextmanager
def picker_process(*arguments: str, port: int | None = None) -> Iterator[str]:
    """The address of an endpoint picker that is ready."""
    address = f"{HOST}:{port or free_port(set())}"
    command = [
        *(sys.executable, "-m", "baton", "picker"),
        *("--port", address.rpartition(":")[2], "--probe-interval-s", "0.2", *arguments),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until(lambda: health_of(address), 60, "ready", (grpc.RpcError,))
            yield address
        finally:
            process.terminate()
            process.wait(20)


def health_of(address: str, service: str = "readiness") -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
