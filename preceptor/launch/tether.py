"""Become another command that dies when its parent does: `python tether.py PARENT_PID COMMAND...`.

However a launcher ends, even by SIGKILL, it leaves nothing behind. This is a program of its own
because the request has to be made in the child, and running Python between fork and exec of a
process with threads is not safe. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's death, then exec the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        sys.exit(f"the launcher (process {parent}) has died")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
