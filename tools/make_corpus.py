"""``megatron make-corpus`` of this checkout: see megatron/tools/make_corpus.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.console import main

if __name__ == "__main__":
    sys.exit(main(["make-corpus", *sys.argv[1:]]))
