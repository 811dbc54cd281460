"""Local cluster: Redis, a router and workers as child processes on this machine.

    with LocalCluster(num_prefill=2) as cluster, Client(cluster.address) as client:
        print(client.generate("def main():").text())

Independent of terminals: it reports to a callback.
"""

import contextlib
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Self

from baton.cli.local.devices import on_devices
from baton.cli.local.ports import HOST, free_port
from baton.cli.local.process import Flags, Process, Role
from baton.cli.local.signals import signals_deferred
from baton.cli.local.status import ANSWER_TIMEOUT, LoadingTimes, OnStatus, Status, status_of
from baton.cli.local.tls_folder import TlsFolder
from baton.client.client import Client, Worker
from baton.cluster.process_folder import ProcessFolder, remove_abandoned
from baton.cluster.redis.client import check_answers
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import (
    BatonError,
    DeadlineExceededError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.models import named
from baton.models.support import check_has_encoder, check_has_tokenizer, check_model

START_TIMEOUT = 120.0
STOP_TIMEOUT = 10.0

_POLL_INTERVAL = 0.1
_MAX_MOVES = 3  # consecutive restarts of one process, each on another port
# Seconds for requests in flight to end; well below the time after which all are killed.
_DRAIN_TIMEOUT = 5.0
_STOP_ORDER: tuple[Role, ...] = ("router", "decode", "prefill", "encode")
_NO_FLAGS: Flags = {}
_SETTLED = ("ready", "draining")  # a worker that drains is not ready any more


class LocalCluster:
    """Local cluster of one router and its workers. `start` and `stop` it, or use it in `with`.

    All its processes are killed when this process dies, for whatever reason (Linux). The kernel
    counts the thread that called `start` or `restart` as parent: use one that lasts.

    Args:
        model: "tiny", a folder, a GGUF file or a hub id; several with commas between, of which
            each gets workers of its own.
        num_prefill, num_decode, num_encode: workers of each model. Without prefill workers decode
            workers compute prompts themselves.
        port: port of the router; 0 takes a free one.
        admin_port: port of its admin service; likewise.
        http_port: port for HTTP beside gRPC on the router; 0 takes a free one, None: no HTTP.
        redis_url: an existing Redis; None starts an embedded one.
        worker_flags: settings of every worker by field name, such as `{"num_blocks": 64}`.
        encode_flags, prefill_flags, decode_flags: settings of one role's workers; they override
            `worker_flags`.
        router_flags: settings of the router.
        tls_dir: folder of certificates made by `baton certs`, with which all processes use TLS.
        log_dir: folder of the logs, a file for each process; None: they are deleted by `stop`,
            except those of processes that failed unexpectedly.

    Raises `InvalidArgumentError` for settings that workers would refuse.

    Attributes:
        model: as given.
        tls: the certificates, if there are any.
        redis: the embedded Redis, which may be stopped and started again; None: an existing one.
        redis_url: the Redis in use.
    """

    def __init__(
        self,
        model: str = "tiny",
        num_prefill: int = 1,
        num_decode: int = 1,
        port: int = 0,
        redis_url: str | None = None,
        *,
        num_encode: int = 0,
        admin_port: int = 0,
        http_port: int | None = None,
        worker_flags: Flags = _NO_FLAGS,
        encode_flags: Flags = _NO_FLAGS,
        prefill_flags: Flags = _NO_FLAGS,
        decode_flags: Flags = _NO_FLAGS,
        router_flags: Flags = _NO_FLAGS,
        log_dir: Path | None = None,
        tls_dir: Path | None = None,
    ) -> None:
        self.model = model
        self._models = model.split(",")
        # Of the router, as given: not to be replaced by free ones.
        self._fixed_ports = {port, admin_port, http_port or 0} - {0}
        self._ports = set(self._fixed_ports)
        self._replaced: dict[str, set[int]] = {}  # epochs of workers that have been replaced
        self._num_moves = Counter[str]()  # of each process since its start was requested
        self._log_dir = log_dir
        self.tls = None if tls_dir is None else TlsFolder(tls_dir)
        self._folder: ProcessFolder | None = None
        redis_port = self._free_port()
        self.redis = EmbeddedRedis(redis_port) if redis_url is None else None
        self.redis_url = redis_url or f"redis://{HOST}:{redis_port}/0"
        all_flags = {
            "redis_url": self.redis_url,
            "model": model,
            "drain_timeout_s": _DRAIN_TIMEOUT,
        }
        self._router = Process(
            "router",
            "router",
            port or self._free_port(),
            {**all_flags, **router_flags},
            admin_port=admin_port or self._free_port(),
            metrics_port=self._free_port(),
            http_port=self._free_port() if http_port == 0 else http_port,
            tls=self.tls,
        )
        of_role: dict[Role, tuple[int, Flags]] = {
            "encode": (num_encode, encode_flags),
            "prefill": (num_prefill, prefill_flags),
            "decode": (num_decode, decode_flags),
        }
        names: list[tuple[Role, int]] = []
        flags: list[Flags] = []
        for role, (count, own) in of_role.items():
            for index in range(count * len(self._models)):
                names.append((role, index))
                served = self._models[index // count]
                flags.append({**all_flags, "model": served, **worker_flags, **own})
        self._workers = [
            self._worker(role, index, own)
            for (role, index), own in zip(names, on_devices(flags), strict=True)
        ]
        for one in {process.role: process for process in self._workers}.values():
            one.check_settings()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Router's address, which a `Client` takes. Final once `start` has returned."""
        return self._router.endpoint

    @property
    def admin_address(self) -> str:
        """Address of the router's admin service; final likewise."""
        return self._router.admin_endpoint

    @property
    def metrics_endpoints(self) -> dict[str, str]:
        """Metrics address of each process, for /metrics. Final once `start` has returned."""
        return {p.name: p.metrics_endpoint for p in self.processes if p.metrics_endpoint}

    @property
    def http_address(self) -> str:
        """Router's HTTP address, "http://host:port"; final likewise."""
        return self._router.http_address

    @property
    def processes(self) -> list[Process]:
        """Router, then the encode workers, the prefill workers and the decode workers."""
        return [self._router, *self._workers]

    def process(self, name: str) -> Process:
        """Returns the process called "router", "prefill-0", "decode-1" and so on."""
        return next(process for process in self.processes if process.name == name)

    def start(
        self, timeout: float | None = START_TIMEOUT, on_status: OnStatus = lambda _: None
    ) -> None:
        """Starts the cluster, and waits until every worker can serve requests.

        Args:
            timeout: seconds; None: no limit.
            on_status: called repeatedly with the status of every process.

        Raises:
            UnsupportedModelError: the model cannot be served by its description, or has no encoder
                for an encode worker; nothing was started.
            UnavailableError: Redis does not answer, or a process died; the message has the end of
                its log.
            DeadlineExceededError: the cluster was not ready after `timeout` seconds.
            FailedPreconditionError: there is no Redis server to start.

        If it raises, it leaves nothing running.
        """
        assert self._folder is None, "the cluster was started already"
        for model in (named(given)[1] for given in self._models):
            check_model(model)
            check_has_tokenizer(model)
            if any(worker.role == "encode" for worker in self._workers):
                check_has_encoder(model)
        remove_abandoned()
        self._folder = ProcessFolder()
        try:
            for process in self.processes:
                process.preload()
            if self.redis is not None:
                with signals_deferred():
                    self.redis.start()
            check_answers(self.redis_url)
            for process in self.processes:
                process.start(self._log_dir or self._folder.path)
            self.wait_ready(timeout, on_status)
        except BaseException:
            self.stop(0.0)
            raise

    def wait_ready(
        self, timeout: float | None = START_TIMEOUT, on_status: OnStatus = lambda _: None
    ) -> None:
        """Waits until the router can use every worker that is running and does not drain; raises as
        `start`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        statuses = {process.name: Status(process.name) for process in self.processes}
        times = LoadingTimes()
        while True:
            is_ready = self._is_ready(statuses)
            # After it, for which a process that has ended need not be ready.
            has_moved = self._move_those_without_port()
            self.check()
            if is_ready and not has_moved:
                break
            now = time.monotonic()
            on_status(
                [replace(s, seconds_left=times.seconds_left(s, now)) for s in statuses.values()]
            )
            if deadline is not None and time.monotonic() > deadline:
                late = ", ".join(s.name for s in statuses.values() if not s.is_ready)
                raise DeadlineExceededError(
                    f"{late or 'the router'} did not become ready within {timeout:g} s"
                )
            time.sleep(_POLL_INTERVAL)
        on_status(list(statuses.values()))

    def check(self) -> None:
        """Raises `UnavailableError` if a process died without having been signalled."""
        dead: dict[str, list[str]] = {}  # names of processes, by their failure
        for process in self.processes:
            if process.has_failed:
                dead.setdefault(process.failure(), []).append(process.name)
        if dead:
            raise UnavailableError(
                "\n".join(f"{' and '.join(names)} {failure}" for failure, names in dead.items())
            )

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Sends a process a signal; after SIGKILL it has ended. `check` ignores its end."""
        self.process(name).signal(signum)

    def restart(self, name: str, timeout: float | None = START_TIMEOUT) -> None:
        """Restarts a process that has ended, with the same command line; raises as `start`."""
        assert self._folder is not None, "the cluster is not running"
        # On the same port it could pass for its predecessor until the router reads its new record.
        worker = self.process(name).worker_id
        self._replaced[worker] = {w.epoch for w in self._listed() if w.id == worker}
        self._num_moves[name] = 0
        self.process(name).start(self._log_dir or self._folder.path)
        self.wait_ready(timeout)

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Ends the router, then the decode, prefill and encode workers, and Redis. Idempotent.

        Requests in flight may end first. Processes left after `timeout` seconds, or when
        interrupted, are killed.
        """
        deadline = time.monotonic() + timeout
        try:
            for role in _STOP_ORDER if timeout > 0 else ():
                self._end([p for p in self.processes if p.role == role], deadline)
        finally:
            for process in self.processes:
                process.signal(signal.SIGKILL)
            if self.redis is not None:
                self.redis.stop()
            self._delete_folder()

    def _delete_folder(self) -> None:
        """Deletes the temporary folder, except for the logs that an error has named."""
        if self._folder is None:
            return
        folder, kept = self._folder.path, {}
        for process in self.processes:
            if process.has_failed and process.unexpected_error():
                kept[process.log_path] = process.log_path.read_bytes()
        self._folder.remove()
        self._folder = None
        if self._log_dir is None and kept:
            folder.mkdir(mode=0o700)
            for path, content in kept.items():
                path.write_bytes(content)

    def _end(self, processes: list[Process], deadline: float) -> None:
        for process in processes:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        for process in processes:
            process.wait(deadline)

    def _is_ready(self, statuses: dict[str, Status]) -> bool:
        """Returns whether all running processes serve, or drain, and the router knows it. Updates
        `statuses`."""
        running = [process for process in self.processes if process.is_running]
        for process in running:
            if not statuses[process.name].is_ready:
                statuses[process.name] = status_of(process, statuses[process.name])
        ready = {p.role for p in running if statuses[p.name].is_ready}
        # Without a worker of each role that it has a router may be unable to place any request.
        roles = {"decode", *(p.role for p in self._workers if p.role == "prefill")}
        needed = running if roles <= ready else self._workers
        if not all(statuses[p.name].state in _SETTLED for p in needed if p in running):
            return False
        if self._router.is_running and not self._takes_calls():
            return False
        routed = {
            worker.id
            for worker in self._listed()
            if worker.state in _SETTLED and worker.epoch not in self._replaced.get(worker.id, ())
        }
        return {p.worker_id for p in running if p.role != "router"} <= routed

    def _takes_calls(self) -> bool:
        """Returns whether the router answers this process, whose connections to a router that was
        there before are in backoff."""
        try:
            with Client(self.address, timeout=ANSWER_TIMEOUT, tls=self._router.tls) as client:
                client.get_model()
        except (UnauthenticatedError, OverloadedError):  # it answers
            return True
        except BatonError:
            return False
        return True

    def _listed(self) -> list[Worker]:
        """Returns the workers that the router lists; none if it does not answer."""
        with (
            contextlib.suppress(BatonError),
            Client(self.admin_address, timeout=ANSWER_TIMEOUT, tls=self._router.tls) as client,
        ):
            return client.list_workers()
        return []

    def _move_those_without_port(self) -> bool:
        """Restarts processes that found a port taken, on other ports; returns whether any did."""
        has_moved = False
        for process in self.processes:
            may_move = self._num_moves[process.name] < _MAX_MOVES
            lost = process.lost_port if may_move else None
            if lost is None or lost in self._fixed_ports:
                continue
            process.move(lost, self._free_port())
            self._num_moves[process.name] += 1
            process.start(process.log_path.parent)
            has_moved = True
        return has_moved

    def _worker(self, role: Role, index: int, flags: Flags) -> Process:
        name = f"{role}-{index}"
        # In a Redis shared with other clusters the name would not be unique.
        own = {} if self.redis is None else {"worker_id": name}
        return Process(
            name,
            role,
            self._free_port(),
            {**own, **flags},
            admin_port=self._free_port(),
            metrics_port=self._free_port(),
            tls=self.tls,
        )

    def _free_port(self) -> int:
        port = free_port(self._ports)
        self._ports.add(port)
        return port
