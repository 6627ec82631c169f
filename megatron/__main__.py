"""``python -m megatron``: the same as the console command ``megatron``."""

import sys

from megatron.console import main

if __name__ == "__main__":
    sys.exit(main())
