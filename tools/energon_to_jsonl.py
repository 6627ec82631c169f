"""``megatron energon-to-jsonl`` of this checkout: see megatron/tools/energon_to_jsonl.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.console import main

if __name__ == "__main__":
    sys.exit(main(["energon-to-jsonl", *sys.argv[1:]]))
