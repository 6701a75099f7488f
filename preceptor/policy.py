"""Published student weights: version folder -> manifest -> atomic pointer.

The trainer publishes, rollout workers read. A reader verifies sizes and hashes before it loads and
keeps what it has when they do not hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from preceptor import manifest
from preceptor.v1 import common_pb2

POINTER = "latest.json"


@dataclass(frozen=True, order=True)
class Version:
    """A policy version. Steps are never reused within an incarnation; both only grow."""

    incarnation: int
    step: int

    @classmethod
    def of(cls, message: common_pb2.PolicyVersion) -> Self:
        """From the wire."""
        return cls(message.incarnation, message.step)

    def message(self) -> common_pb2.PolicyVersion:
        """For the wire."""
        return common_pb2.PolicyVersion(incarnation=self.incarnation, step=self.step)

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.step:06d}"


class PolicyStore:
    """The folder that holds a run's published versions, on a disk all parts see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, version: Version, write: Callable[[Path], None]) -> Path:
        """Write a version, hash it, then move the pointer to it.

        Args:
            version: a version that was never published before.
            write: saves the weights into the folder it is given.

        Raises:
            FileExistsError: the version exists.
            OSError: it could not be written; the pointer still names the version before.
        """
        folder = self.path(version)
        info = {"incarnation": version.incarnation, "step": version.step}
        manifest.write_folder(folder, write, info)
        manifest.replace_text(self.folder / POINTER, json.dumps(info))
        return folder

    def path(self, version: Version) -> Path:
        """Where a version lies, whether it exists or not."""
        return self.folder / str(version)

    def latest(self) -> Version | None:
        """The version the pointer names, or None before the first publication."""
        try:
            info = json.loads((self.folder / POINTER).read_text())
        except FileNotFoundError:
            return None
        return Version(info["incarnation"], info["step"])

    def verified(self, version: Version) -> Path:
        """The folder of a version whose files all match its manifest.

        Raises:
            manifest.CorruptFolder: a file is missing, cut or different, or it is another version.
        """
        folder = self.path(version)
        info = manifest.verify_folder(folder)
        if info != {"incarnation": version.incarnation, "step": version.step}:
            raise manifest.CorruptFolder(f"{folder} holds version {info}, not {version}")
        return folder

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` versions. The pointer's version always stays."""
        latest = self.latest()
        found = [path for path in self.folder.glob("[0-9]*-[0-9]*") if path.is_dir()]
        versions = sorted(Version(*map(int, path.name.split("-"))) for path in found)
        for version in versions[: max(0, len(versions) - keep)]:
            if version != latest:
                shutil.rmtree(self.path(version))
