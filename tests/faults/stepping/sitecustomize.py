"""A wall clock that another process can step. With this folder on PYTHONPATH every Python program has it.

FAULTS_CLOCK names a file of eight bytes: the offset of the time of day in seconds. The monotonic clock and the
database's clock are unchanged.
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
