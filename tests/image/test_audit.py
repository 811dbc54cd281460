"""`make audit`: what it finds, and that it says so where it could not look."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.cli.local.ports import HOST, free_port
from tests.support.container_file import ROOT

AUDIT = ROOT / "helm" / "image" / "audit.py"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def audit(folder, *options):
    command = [sys.executable, AUDIT, "--sbom", folder, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@contextmanager
def vulnerability_service(known):
    """An OSV service that knows of these vulnerabilities, by package."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            vulnerabilities = known.get(asked["package"]["name"], [])
            body = json.dumps({"vulns": vulnerabilities} if vulnerabilities else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def test_audit_lists_all_packages_with_hashes_in_sboms(tmp_path):
    with vulnerability_service({}) as url:
        done = audit(tmp_path, "--osv-url", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("audit: no known vulnerabilities\n")
    for lock in ("router", "worker"):
        bom = json.loads((tmp_path / f"baton-{lock}.cdx.json").read_text())
        assert bom["bomFormat"] == "CycloneDX"
        assert bom["metadata"]["component"]["name"] == "baton-serve"
        named = {f"{c['name']}=={c['version']}" for c in bom["components"]}
        lines = (AUDIT.parent / f"{lock}.txt").read_text().splitlines()
        assert named == {line.split()[0] for line in lines if "==" in line}
        for found in bom["components"]:
            assert any(r.get("hashes") for r in found["externalReferences"]), found["name"]


def test_audit_fails_on_known_vulnerability(tmp_path):
    bad = {
        "id": "OSV-2031-1",
        "summary": "Reads too much.",
        "affected": [
            {
                "package": {"name": "redis", "ecosystem": "PyPI"},
                "ranges": [
                    {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}
                ],
            }
        ],
    }
    with vulnerability_service({"redis": [bad]}) as url:
        done = audit(tmp_path, "--osv-url", url)
    assert done.returncode == 1
    assert "router: redis " in done.stderr
    assert "worker: redis " in done.stderr
    assert "OSV-2031-1, mended in 99.1" in done.stderr


def test_audit_fails_when_vulnerability_service_is_unreachable(tmp_path):
    done = audit(tmp_path, "--osv-url", f"http://{HOST}:{free_port(set())}/v1/query")
    assert done.returncode == 1
    assert "router: the vulnerability service was not asked: " in done.stderr
    assert done.stderr.endswith("audit: failed\n")
