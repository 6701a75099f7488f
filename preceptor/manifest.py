"""Folders that are whole or not there: written aside, hashed, then renamed into place.

Policies and checkpoints are both kept this way. A reader verifies before it loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class CorruptFolder(RuntimeError):
    """A folder does not hold what its manifest promises."""


def write_folder(
    folder: Path, write: Callable[[Path], None], info: dict[str, Any]
) -> dict[str, Any]:
    """Make `folder` appear at once, with everything `write` puts into it and a manifest.

    Args:
        folder: where it will be; it may not exist yet.
        write: fills the temporary folder it is given.
        info: JSON-able facts kept in the manifest.

    Returns:
        The manifest: {"info": ..., "files": {name: {"bytes": int, "sha256": hex}}}.

    Raises:
        FileExistsError: the folder exists; versions are never rewritten.
        OSError: the disk is full or not writable. Nothing appears under the final name then.
    """
    temporary = open_folder(folder)
    try:
        write(temporary)
        return seal_folder(temporary, folder, info)
    except BaseException:
        # Half a version must not stay, whatever stopped us, a signal included.
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def open_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and given to `seal_folder`; for writers that
    take their time. `sweep` deletes what is never sealed.

    Raises:
        FileExistsError: the folder exists; versions are never rewritten.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a version is written once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def seal_folder(temporary: Path, folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Hash what `open_folder`'s folder holds and give it its name. Arguments as write_folder."""
    manifest = {"info": info, "files": _describe(temporary)}
    path = temporary / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    _sync(path)
    temporary.rename(folder)
    _sync(folder.parent)
    return manifest


def sweep(folder: Path) -> None:
    """Delete what a killed writer left half-done in `folder`. Call it while nobody else writes."""
    for leftover in folder.glob(".*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def verify_folder(folder: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the manifest's info.

    Raises:
        CorruptFolder: the manifest is missing or unreadable, or a file is missing, longer, shorter
            or different.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, info = manifest["files"], manifest["info"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFolder(f"{folder}: no readable manifest ({error})") from error
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptFolder(f"{path} is missing")
        if path.stat().st_size != wanted["bytes"]:
            raise CorruptFolder(
                f"{path} has {path.stat().st_size} bytes, its manifest says {wanted['bytes']}"
            )
        if _sha256(path) != wanted["sha256"]:
            raise CorruptFolder(f"{path} differs from its manifest's sha256")
    return info


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
