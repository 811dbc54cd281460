"""Generates the stubs in `baton/v1/` and `baton/envoy/` from the `.proto` files; `--check` only
compares.

The stubs are committed, so that installing Baton needs no protoc. Run through `make protos`.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGES = (Path("baton/v1"), Path("baton/envoy"))


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, their types and, for files with a service, `*_pb2_grpc.py` below `out`."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    # protoc finds its plug-ins for types on the PATH; they lie beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = sorted(file for package in PACKAGES for file in (PROTOS / package).glob("*.proto"))
    served = [f for f in files if "\nservice " in f.read_text()]
    for outputs, sources in (
        ([f"--python_out={out}", f"--mypy_out=quiet:{out}"], files),
        ([f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"], served),
    ):
        if (
            protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *map(str, sources)])
            != 0
        ):
            sys.exit("protoc failed; its messages are above")


def differences(fresh: Path) -> list[str]:
    """Names the files in which the committed stubs and those below `fresh` differ."""
    committed, generated = (_stubs(base) for base in (ROOT, fresh))
    names = committed.keys() | generated.keys()
    return sorted(n for n in names if committed.get(n) != generated.get(n))


def _stubs(base: Path) -> dict[str, bytes]:
    found = (path for package in PACKAGES for path in (base / package).glob("*_pb2*"))
    return {str(path.relative_to(base)): path.read_bytes() for path in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the stubs are out of date")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        if stale := differences(Path(scratch)):
            sys.exit(f"stubs differ from protos/ ({', '.join(stale)}); run `make protos`")


if __name__ == "__main__":
    main()
