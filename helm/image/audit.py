"""SBOMs of the images, and known vulnerabilities in them. Run through `make audit`.

Writes an SBOM of each image (CycloneDX, `baton-router.cdx.json` and `baton-worker.cdx.json`), and
asks PyPI, or an OSV service, for known vulnerabilities of every version that the locks name. Fails
where there is one, and where a package could not be looked up: pip-audit by itself passes over what
its service does not know, and would find nothing wrong where the service knows nothing at all.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LOCKS = ("router", "worker")
_TIMEOUT = 600  # seconds, for all packages of one lock


def write_sbom(lock: str, folder: Path) -> Path:
    """The file that it has written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"baton-{lock}.cdx.json"
    subprocess.run(  # noqa: S603 - a command line of our own
        [
            *(sys.executable, "-W", "ignore::UserWarning", "-m", "cyclonedx_py", "requirements"),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"),
            *("--output-file", str(path), str(FOLDER / f"{lock}.txt")),
        ],
        check=True,
    )
    return path


def problems(lock: str, osv_url: str | None) -> Iterator[str]:
    """Yields a line for each vulnerable package of a lock, or for a failed lookup."""
    service = ("--vulnerability-service", "osv", "--osv-url", osv_url) if osv_url else ()
    done = subprocess.run(  # noqa: S603 - a command line of our own
        [
            *(sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip"),
            *("--requirement", str(FOLDER / f"{lock}.txt"), *service),
            *("--format", "json", "--progress-spinner", "off"),
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        yield f"the vulnerability service was not asked: {last}"
        return
    unknown = [package["name"] for package in found if "skip_reason" in package]
    if unknown:
        yield (
            f"{len(unknown)} of {len(found)} packages were not looked up, for the vulnerability "
            f"service does not know them: {', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}"
        )
    for package in found:
        yield from _vulnerabilities(package)


def _vulnerabilities(package: dict[str, Any]) -> Iterator[str]:
    for known in package.get("vulns", ()):
        better = ", ".join(known["fix_versions"]) or "no version yet"
        yield f"{package['name']} {package['version']}: {known['id']}, mended in {better}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sbom", type=Path, default=ROOT / "dist", help="where SBOMs go (dist)")
    parser.add_argument("--osv-url", help="an OSV service to ask in place of PyPI")
    arguments = parser.parse_args()
    is_well = True
    for lock in LOCKS:
        print(f"{lock}: {write_sbom(lock, arguments.sbom)}", flush=True)
        for problem in problems(lock, arguments.osv_url):
            print(f"{lock}: {problem}", file=sys.stderr)
            is_well = False
    if not is_well:
        sys.exit("audit: failed")
    print("audit: no known vulnerabilities")


if __name__ == "__main__":
    main()
