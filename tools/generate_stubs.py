"""Writes the Python stubs in preceptor/v1 from proto/, or checks that they have not drifted.

The pinned grpcio-tools emits stubs for the oldest protobuf and grpcio that pyproject.toml allows: a
runtime refuses stubs newer than itself.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Run protoc over every file of the contract.

    Raises:
        SystemExit: protoc refused the contract.
    """
    files = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    builtin = str(resources.files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{builtin}"]
    arguments += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *files]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    package = out / "preceptor" / "v1"
    for path in package.glob("*_pb2_grpc.py"):
        # A file without a service gets an empty stub module; nobody imports those.
        if "class " not in path.read_text():
            path.unlink()


def main() -> None:
    """Entry point: writes in place, or with --check compares and changes nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the stubs have drifted")
    check = parser.parse_args().check
    if not check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, kept = Path(folder) / "preceptor" / "v1", ROOT / "preceptor" / "v1"
        wanted = {path.name for path in fresh.iterdir()}
        present = {path.name for path in kept.glob("*_pb2*")}
        drifted = wanted ^ present
        drifted |= set(filecmp.cmpfiles(fresh, kept, wanted & present, shallow=False)[1])
    if drifted:
        sys.exit(f"stubs differ from proto/: {sorted(drifted)}; run make proto")
    print("stubs match proto/")


if __name__ == "__main__":
    main()
