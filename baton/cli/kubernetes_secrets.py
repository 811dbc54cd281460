"""Secrets of Kubernetes with the certificates of `baton certs`, for a release of the chart."""

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

from baton.errors import InvalidArgumentError
from baton.serving.grpc.access import Role

# A label of RFC 1123.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# As the chart cuts names.
_MAX_NAME, _MAX_RELEASE, _CHART = 40, 34, "baton"
_OF_CHART: tuple[Role, ...] = ("router", "encode", "prefill", "decode")
_ROLES: tuple[Role, ...] = (*_OF_CHART, "worker", "client", "admin")


def check_names(namespace: str, release: str) -> None:
    """Raises `InvalidArgumentError` for names that Kubernetes or Helm refuse."""
    for option, name, most in (("--secrets", namespace, 63), ("--release", release, 53)):
        if not _LABEL.fullmatch(name) or len(name) > most:
            raise InvalidArgumentError(
                option,
                f"is {name!r}; expected lower case letters, digits and hyphens, at most {most}",
            )


def service_hosts(namespace: str, release: str) -> list[str]:
    """Returns the DNS names by which clients in the cluster reach the routers of a release."""
    router = f"{_full_name(release)}-router"
    return [
        f"{service}{domain}"
        for service in (router, f"{router}-headless")
        for domain in ("", f".{namespace}", f".{namespace}.svc")
    ]


def manifests(folder: Path, namespace: str, release: str) -> str:
    """Returns a List of Secrets, one of each role, as JSON for `kubectl apply -f -`. `folder` has
    what `baton.cli.certs.make` wrote."""
    items = [_secret(folder, namespace, release, role) for role in _ROLES]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


def values(release: str) -> dict[str, str]:
    """Returns the chart's values that name these secrets, for `helm install --set`."""
    named = {f"tls.existingSecrets.{role}": _secret_name(release, role) for role in _OF_CHART}
    client = _secret_name(release, "client")
    return {"tls.enabled": "true", **named, "helmTest.clientSecret": client}


def _secret(folder: Path, namespace: str, release: str, role: Role) -> dict[str, Any]:
    files = {"tls.crt": f"{role}.pem", "tls.key": f"{role}.key", "ca.crt": "ca.pem"}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": _secret_name(release, role),
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/name": _CHART,
                "app.kubernetes.io/instance": release,
                "app.kubernetes.io/component": role,
            },
        },
        "data": {k: b64encode((folder / name).read_bytes()).decode() for k, name in files.items()},
    }


def _secret_name(release: str, role: Role) -> str:
    return f"{_full_name(release)}-{role}-tls"


def _full_name(release: str) -> str:
    if _CHART in release:
        return release[:_MAX_NAME].removesuffix("-")
    return f"{release[:_MAX_RELEASE].removesuffix('-')}-{_CHART}"
