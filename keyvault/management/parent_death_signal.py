"""Run a command that ends when its parent process ends, kill -9 included (Linux).

    python -I -S parent_death_signal.py PARENT_PID SIGNAL COMMAND [ARGUMENT...]

A separate program instead of `preexec_fn`, which would run Python between fork and exec while a thread of the parent
may hold any lock. It imports the standard library only and then executes the command in its place.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, number, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)  # the parent died before prctl
    os.execv(command[0], command)  # noqa: S606  no shell is wanted: the command is a list


if __name__ == "__main__":
    main(sys.argv[1:])
