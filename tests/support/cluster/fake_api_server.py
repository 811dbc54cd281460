"""API server of Kubernetes that has some objects, as much as Helm's `lookup` asks of one."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}


@contextmanager
def api_server(
    folder: Path, kinds: set[tuple[str, str]], objects: Sequence[dict[str, Any]]
) -> Iterator[Path]:
    """Serves `objects` on a port of loopback, and that there are `kinds`: pairs of apiVersion and
    kind. Yields the kubeconfig that leads there, a file in `folder`."""
    known = _discovery(kinds)
    for found in objects:
        metadata, version = found["metadata"], found["apiVersion"]
        place = f"namespaces/{metadata['namespace']}/{_plural(found['kind'])}/{metadata['name']}"
        known[f"{_path(version)}/{place}"] = found

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = known.get(self.path.partition("?")[0])
            content = json.dumps(found or {**_MISSING, "code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (folder / "kubeconfig").write_text(_config(f"http://127.0.0.1:{server.server_port}"))
        try:
            yield folder / "kubeconfig"
        finally:
            server.shutdown()


def _discovery(kinds: set[tuple[str, str]]) -> dict[str, Any]:
    """Returns the answers, by path, that name the kinds."""
    resources = defaultdict(list)
    for version, kind in sorted(kinds):
        resource = {"name": _plural(kind), "namespaced": True, "kind": kind, "verbs": ["get"]}
        resources[version].append(resource)
    groups = []
    for version in resources.keys() - {"v1"}:
        name, _, number = version.partition("/")
        found = {"groupVersion": version, "version": number}
        groups.append({"name": name, "versions": [found], "preferredVersion": found})
    return {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        **{
            _path(version): {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": found,
            }
            for version, found in resources.items()
        },
    }


def _path(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _config(url: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {}}],
    }
    return json.dumps(config)
