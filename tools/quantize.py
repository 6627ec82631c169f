"""``megatron quantize`` of this checkout: see megatron/tools/quantize.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.console import main

if __name__ == "__main__":
    sys.exit(main(["quantize", *sys.argv[1:]]))
