"""`python -m bigunet`, and `torchrun -m bigunet`: the command line."""

import os
import sys

from bigunet.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if "RANK" not in os.environ or end.code not in (None, 0):
            raise
        # A finished rank leaves at once, as in `bigunet.launch`: threads that torch and gloo leave
        # behind can abort the interpreter's own way out.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
