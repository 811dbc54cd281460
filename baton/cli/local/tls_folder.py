"""Folder of certificates, made by `baton certs`, for the processes of a local cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.errors import FailedPreconditionError
from baton.rpc.tls import Tls
from baton.serving.grpc.access import ROUTER_NAME, WORKER_NAME, Role


@dataclass(frozen=True, slots=True)
class TlsFolder:
    """Folder of certificates. Raises `FailedPreconditionError` if there is none."""

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / "ca.pem").exists():
            raise FailedPreconditionError(
                f"{self.path / 'ca.pem'} does not exist; `baton certs {self.path}` creates it"
            )

    def own(self, role: Literal["router", "worker"]) -> dict[str, object]:
        """Returns the TLS settings of a process."""
        tls = self.shown_by(role)
        return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}

    def shown_by(self, role: Role, server_name: str | None = None) -> Tls:
        folder = self.path.absolute()
        files = folder / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key"
        return Tls(*files, server_name)

    def to_router(self, role: Role = "client") -> Tls:
        """Returns the files that a client shows to a router, wherever it listens."""
        return self.shown_by(role, ROUTER_NAME)

    def to_worker(self, role: Role = "admin") -> Tls:
        return self.shown_by(role, WORKER_NAME)
