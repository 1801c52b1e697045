"""A wall clock that is stepped from outside: on PYTHONPATH, every Python program of that environment has it.

FAULTS_CLOCK names a file of eight bytes, the seconds that are added to the time of day. Nothing else is moved: not the
monotonic clock, not the database's.
"""

import mmap
import os
import struct
import time

if path := os.environ.get("FAULTS_CLOCK"):
    with open(path, "rb") as file:
        _step = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    _time = time.time
    time.time = lambda: _time() + struct.unpack("d", _step[:8])[0]
