"""The clusters that tests share: ten named shapes, each running at most once at a time.

A test that needs another flag of the router adds a router to a shape (`second_router`), which takes
a second; only tests of `LocalCluster` and of the commands that start one construct their own.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from baton.cli.certs import LOCAL_HOSTS, Authority, Issued, write
from baton.cli.local.local_cluster import LocalCluster
from tests.support.cluster.network import Network
from tests.support.cluster.rolling import Pools, pools
from tests.support.cluster.wide import HANDOFFS, restored
from tests.support.router.images import save_checkpoint
from tests.support.serving.otlp_receiver import Collector, collecting

_ROLES = ("router", "worker", "client", "admin")


@contextmanager
def single() -> Iterator[LocalCluster]:
    """One worker of each role, for tests that only send requests and read what comes.

    Prompts come in several chunks. The decode pool holds one sequence of the model's length, but
    not two dozen of any length.
    """
    with LocalCluster(
        worker_flags={"max_num_batched_tokens": 48, "max_num_seqs": 32},
        decode_flags={"num_blocks": 130},
        router_flags={"reflection": True, **HANDOFFS},
        http_port=0,
    ) as cluster:
        yield cluster


@contextmanager
def pair(**worker_flags: object) -> Iterator[LocalCluster]:
    """Two workers of each role, to be killed, stopped and drained: another one can go on.

    Args:
        worker_flags: more of them.
    """
    flags = {"max_num_batched_tokens": 32, "num_blocks": 1024, "drain_timeout_s": 1.0}
    with LocalCluster(
        num_prefill=2,
        num_decode=2,
        worker_flags={**flags, **worker_flags},
        router_flags=HANDOFFS,
    ) as cluster:
        yield cluster


@contextmanager
def narrow() -> Iterator[LocalCluster]:
    """One worker of each role in which each stage of a request can be held open: the prefill worker
    computes one token a step, for one prompt at a time, and the decode worker runs one sequence at
    a time, the most urgent first."""
    with LocalCluster(
        worker_flags={"policy": "priority"},
        prefill_flags={"max_num_batched_tokens": 1},
        decode_flags={"max_num_seqs": 1, "num_blocks": 160},
        router_flags={**HANDOFFS, "admission": "none"},  # requests wait at the workers
    ) as cluster:
        yield cluster


@contextmanager
def tight(num_decode: int = 2, **decode_flags: object) -> Iterator[LocalCluster]:
    """Decode workers without room for all that they are given: they preempt and give back.

    The pool of each holds two requests of `ways` or one of several sequences.

    Args:
        decode_flags: more of them.
    """
    flags = {"num_blocks": 44, "max_num_seqs": 24, "free_block_margin": 0.0, "preemption": "return"}
    with LocalCluster(
        num_decode=num_decode,
        decode_flags={**flags, **decode_flags},
        router_flags={**HANDOFFS, "admission": "none"},
    ) as cluster:
        yield cluster


@contextmanager
def swapping() -> Iterator[LocalCluster]:
    """One decode worker without room for all that it is given, which swaps to host memory."""
    with tight(1, preemption="swap", swap_bytes=2**24) as cluster:
        yield cluster


@dataclass(frozen=True, slots=True)
class Secured:
    """A cluster, and the authority that issued its certificates."""

    cluster: LocalCluster
    authority: Authority


def issued(authority: Authority, **options: object) -> dict[str, Issued]:
    """Returns a certificate for each role."""
    return {
        role: authority.issue(role, hosts=LOCAL_HOSTS if role == "router" else (), **options)
        for role in _ROLES
    }


@contextmanager
def secured() -> Iterator[Secured]:
    """Two workers of each role; every connection speaks TLS, and blocks go over the network."""
    authority = Authority()
    with TemporaryDirectory(prefix="baton-tls-") as name:
        folder = Path(name)
        acme = authority.issue("client", "acme")
        write(folder, {"ca": authority.own, "client-acme": acme, **issued(authority)})
        flags = {"num_blocks": 256, "max_num_batched_tokens": 48}
        flags |= {"kv_connector": "grpc", "kv_port": 0}
        with LocalCluster(
            num_prefill=2,
            num_decode=2,
            http_port=0,
            worker_flags=flags,
            router_flags=HANDOFFS,
            tls_dir=folder,
        ) as cluster:
            yield Secured(cluster, authority)


@dataclass(frozen=True, slots=True)
class Traced:
    """A cluster, and the collector that its spans go to."""

    cluster: LocalCluster
    collector: Collector

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables that its processes get when they start."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def restored(self) -> LocalCluster:
        with patch.dict(os.environ, self.environment):
            return restored(self.cluster)


@contextmanager
def traced() -> Iterator[Traced]:
    """One prefill worker and two decode workers that send spans to a collector and log in JSON.

    The decode pools hold one sequence of 300 tokens, but not three.
    """
    as_json = {"log_format": "json"}
    flags = {"max_num_batched_tokens": 48, "max_num_seqs": 16, **as_json}
    cluster = LocalCluster(
        num_decode=2,
        worker_flags=flags,
        decode_flags={"num_blocks": 40},
        router_flags={**HANDOFFS, **as_json},
        http_port=0,
    )
    with _tracing(cluster) as running:
        yield running


@contextmanager
def pictured() -> Iterator[Traced]:
    """Two workers of each role, the encode workers included, of a LLaVA model with random weights;
    they send spans to a collector.

    A prompt takes many steps of a prefill worker, so that prompts queue and other workers encode
    their images.
    """
    with TemporaryDirectory(prefix="baton-llava-") as folder:
        cluster = LocalCluster(
            save_checkpoint("llava_clip", Path(folder)),
            num_encode=2,
            num_prefill=2,
            num_decode=2,
            worker_flags={"device": "cpu", "dtype": "float32", "num_blocks": 256},
            prefill_flags={"max_num_batched_tokens": 2},
            router_flags={"admission": "none"},
            http_port=0,
        )
        with _tracing(cluster) as running:
            yield running


@contextmanager
def _tracing(cluster: LocalCluster) -> Iterator[Traced]:
    """Runs a cluster whose processes send spans to a collector."""
    with collecting() as collector:
        running = Traced(cluster, collector)
        try:
            with patch.dict(os.environ, running.environment):
                cluster.start()
            yield running
        finally:
            cluster.stop()


@dataclass(frozen=True, slots=True)
class Networked:
    """A cluster, and the network between its processes."""

    cluster: LocalCluster
    network: Network


@contextmanager
def networked(in_place: tuple[str, ...] = (), **router_flags: object) -> Iterator[Networked]:
    """Two workers of each role behind proxies that cut, delay and damage what goes through them.

    Args:
        in_place: decode workers that read blocks in the memory of the host.
        router_flags: more of them.
    """
    flags = {"max_num_batched_tokens": 32, "num_blocks": 1024}
    cluster = LocalCluster(
        num_prefill=2,
        num_decode=2,
        worker_flags=flags,
        router_flags={**HANDOFFS, **router_flags},
    )
    with Network(cluster, in_place) as network, cluster:
        yield Networked(cluster, network)


@contextmanager
def rolling(
    worker_drain_s: float = 5.0, model: str = "tiny", **router_flags: object
) -> Iterator[Pools]:
    """Two routers and two workers of each role, all of which are replaced while they serve.

    Args:
        worker_drain_s: seconds in which a worker ends what it runs.
        model: as of `LocalCluster`.
        router_flags: more of them.
    """
    flags = {**HANDOFFS, **router_flags}
    with (
        TemporaryDirectory(prefix="baton-logs-") as name,
        pools(Path(name), worker_drain_s, model, **flags) as running,
    ):
        yield running


def tenants_file(folder: Path, tokens: dict[str, str]) -> Path:
    """Writes which tenant each token is of, and returns where."""
    path = folder / "tokens"
    lines = (f"{hashlib.sha256(token.encode()).hexdigest()} {t}\n" for token, t in tokens.items())
    path.write_text("".join(lines))
    return path
