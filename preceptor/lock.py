"""One launcher, and one trainer, a run folder."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunFolderBusy(RuntimeError):
    """Another process of this kind works in this run folder."""


@contextmanager
def run_folder_lock(folder: Path, kind: str) -> Iterator[None]:
    """Hold the run folder, made if missing, for as long as the context lasts.

    The kernel drops the lock with its process, however that ends, so none is ever stale. The file
    stays: removing it would let two processes each hold a different file of this name.

    Args:
        folder: of the run.
        kind: of process, "launcher" or "trainer": one of each may hold the folder.

    Raises:
        RunFolderBusy: another process of this kind holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunFolderBusy(
                f"{folder} is in use by another {kind} ({file.read().strip()}); stop that one, "
                "or give this run another run.dir"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
