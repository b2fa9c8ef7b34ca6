"""Run a script as one of several processes, and end without shutting the interpreter down.

PyTorch's threads for gloo release the tensors of a collective some time after it has finished. A
thread that needs the interpreter for it while the interpreter shuts down is ended by Python inside
a destructor, which aborts the process: "terminate called without an active exception".

Run as ``python one_rank.py script arguments...``.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])  # as if it were run by itself
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
