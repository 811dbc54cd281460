"""`baton certs`: what it makes, and what takes it."""

import ssl
import stat
from pathlib import Path

from typer.testing import CliRunner

from baton.cli.local.tls_folder import TlsFolder
from baton.cli.main import app
from baton.serving.grpc.access import Identity
from baton.serving.grpc.certificates import read_certificate


def made(folder: Path, *options: str) -> list[Path]:
    result = CliRunner().invoke(app, ["certs", str(folder), *options])
    assert result.exit_code == 0, result.stderr
    return [Path(line) for line in result.stdout.splitlines()]


def test_certs_issues_a_usable_certificate_for_every_role(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    files = made(folder, "--host", "baton.example", "--host", "10.0.0.7", "--tenant", "acme")
    assert sorted(files) == sorted(folder.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificates = TlsFolder(folder)
    router = read_certificate(certificates.shown_by("router"))
    assert router.identity == Identity("router")
    assert router.names == {"baton-router", "localhost", "baton.example"}
    workers = ("worker", "encode", "prefill", "decode")
    for role in workers:
        worker = read_certificate(certificates.shown_by(role))
        assert worker.identity == Identity(role)
        assert worker.names == {"baton-worker"}
    clients = {path.stem for path in files} - {"ca", "router", *workers}
    assert clients == {"admin", "client", "client-acme"}
    for name in clients:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")


def test_certs_overwrites_nothing(tmp_path: Path) -> None:
    made(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = CliRunner().invoke(app, ["certs", str(tmp_path), "--tenant", "new"])
    assert again.exit_code == 1
    assert "already exists; no file was written" in again.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_certs_rejects_invalid_tenant_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "tls"), "--tenant", "a/b"])
    assert result.exit_code == 1
    assert "--tenant: is 'a/b'; must be 1 to 64 letters" in result.stderr
    assert not (tmp_path / "tls").exists()


def test_up_passes_each_process_its_certificate(tmp_path: Path) -> None:
    made(tmp_path)
    arguments = ["up", "--dry-run", "--device", "cpu", "--tls", str(tmp_path)]
    result = CliRunner(env={"BATON_TLS_CERT": "client.pem"}).invoke(app, arguments)
    _, _redis, router, *workers = result.stdout.splitlines()
    assert f"--tls-cert {tmp_path}/router.pem --tls-key {tmp_path}/router.key" in router
    for line in workers:
        assert f"--tls-cert {tmp_path}/worker.pem --tls-key {tmp_path}/worker.key" in line
    missing = CliRunner().invoke(app, ["up", "--dry-run", "--tls", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert f"`baton certs {tmp_path}/none` creates it" in missing.stderr


def test_generate_rejects_certificate_without_tls_ca() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--tls-cert", "a.pem"])
    assert result.exit_code == 1
    assert "--tls-ca: is needed with a certificate" in result.stderr
