"""`python -m planroom`, and the entry point of the script `planroom`."""

from __future__ import annotations

import sys

from planroom.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
