"""A cluster whose processes are containers of the images."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from baton import Client, SamplingParams
from baton.cli.local.ports import HOST, free_port
from baton.errors import UnavailableError
from tests.support.containers import Podman
from tests.support.waiting import wait_until

# Seconds from SIGTERM to SIGKILL. The chart's are more; no end may need SIGKILL.
_GRACE = 60
_STARTS_WITHIN = 300.0
_PROMPT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Containers:
    """Redis and processes of Baton, each in a container.

    A router has the same ports each time it is started, a worker has new ones.

    Args:
        roles: subcommand of each process, by its name.
        settings: of all of them.
    """

    def __init__(
        self,
        podman: Podman,
        images: Mapping[str, str],
        roles: Mapping[str, str],
        **settings: object,
    ) -> None:
        self.podman = podman
        self._images = images
        self._roles = roles
        self._settings = settings
        self._taken: set[int] = set()
        self._ports: dict[str, dict[str, int]] = {}
        redis = self._port()
        self._redis_url = f"redis://{HOST}:{redis}/0"
        server = ["redis-server", "--port", str(redis), "--bind", HOST, "--save", ""]
        podman.start("redis", images["redis"], *server)

    @property
    def routers(self) -> list[str]:
        return [name for name, role in self._roles.items() if role == "router"]

    @property
    def workers(self) -> set[str]:
        return {name for name, role in self._roles.items() if role != "router"}

    @property
    def address(self) -> str:
        """That of the first router."""
        return self.address_of(self.routers[0])

    def address_of(self, name: str, port: str = "port") -> str:
        """Returns the address of a process; `port`: the setting of one of its ports."""
        return f"{HOST}:{self._ports[name][port]}"

    def start(self, role: str, name: str, **settings: object) -> str:
        """Starts a process; returns its address."""
        keys = ("port", "admin_port", *(("http_port",) if role == "router" else ()))
        if role != "router" or name not in self._ports:
            self._ports[name] = {key: self._port() for key in keys}
        if role == "router":
            image, own = self._images["router"], {"conditional_disaggregation": False}
        else:
            image, own = self._images["worker"], {"device": "cpu", "worker_id": name}
            own |= {} if role == "encode-worker" else {"num_blocks": 512}
        common = {"metrics_port": 0, "redis_url": self._redis_url, **self._settings}
        every = {**self._ports[name], **common, **own, **settings}
        self.podman.start(name, image, "baton", role, **every)
        return self.address_of(name)

    @contextmanager
    def temporary(self, role: str, name: str, **settings: object) -> Iterator[str]:
        """Runs a process for the length of the block; yields its address."""
        address = self.start(role, name, **settings)
        try:
            yield address
        finally:
            print(f"== {name}\n{self.podman.logs(name)}")
            self.podman.remove(name)

    def start_again(self, name: str) -> None:
        """Starts a process that has ended, and waits until it serves again."""
        self.podman.remove(name)
        self.start(self._roles[name], name)
        self.until_complete()

    def until_complete(self) -> None:
        """Waits until every router reaches every worker and serves a request."""

        def is_complete() -> bool:
            for name in self.routers:
                admin = self.address_of(name, "admin_port")
                with Client(self.address_of(name), admin_address=admin) as client:
                    found = {each.id for each in client.list_workers() if each.state == "ready"}
                    if found != self.workers or not client.generate("def", _PROMPT).text():
                        return False
            return True

        wait_until(is_complete, _STARTS_WITHIN, "a complete cluster", ignoring=(UnavailableError,))

    def stop(self, name: str) -> int:
        """Stops a container, prints how long that took, and returns its exit code."""
        end = self.podman.stop(name, _GRACE)
        print(f"{name}: exit code {end.exit_code} after {end.seconds:.1f} s")
        return end.exit_code

    def _port(self) -> int:
        port = free_port(self._taken)
        self._taken.add(port)
        return port


@contextmanager
def containers_of(
    podman: Podman, images: Mapping[str, str], roles: Mapping[str, str], **settings: object
) -> Iterator[Containers]:
    """Runs a cluster for the length of the block. At its end all containers end with 0."""
    running = Containers(podman, images, roles, **settings)
    for name, role in roles.items():
        running.start(role, name)
    running.until_complete()
    yield running
    codes = {}
    for name in [*roles, "redis"]:
        if name != "redis":
            print(f"== {name}\n{podman.logs(name)}")
        codes[name] = running.stop(name)
        podman.remove(name)
    assert set(codes.values()) == {0}, codes
