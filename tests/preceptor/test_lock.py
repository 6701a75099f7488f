from __future__ import annotations

import os
import subprocess
import sys

import pytest

from preceptor.lock import RunFolderBusy, run_folder_lock

HOLD = """
import sys, time
from pathlib import Path
from preceptor.lock import run_folder_lock
with run_folder_lock(Path(sys.argv[1]), "launcher"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_held_folder_is_refused_by_the_holders_name(tmp_path):
    folder = tmp_path / "new" / "run"
    words = rf"process {os.getpid()} on .*run\.dir"
    with run_folder_lock(folder, "launcher"), pytest.raises(RunFolderBusy, match=words):
        run_folder_lock(folder, "launcher").__enter__()
    with run_folder_lock(folder, "launcher"), run_folder_lock(folder, "trainer"):
        pass


def test_the_lock_of_a_killed_launcher_is_free(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(RunFolderBusy, match=f"process {holder.pid}"):
        run_folder_lock(tmp_path, "launcher").__enter__()
    holder.kill()
    holder.wait()
    with run_folder_lock(tmp_path, "launcher"):
        pass
