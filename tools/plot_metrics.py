"""``megatron plot`` of this checkout: see megatron/tools/plot_metrics.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.console import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
