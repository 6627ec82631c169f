"""``megatron serve`` with Megatron-LM's command line: see megatron/tools/text_generation_server.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.console import main
from megatron.core.config.errors import EXIT_BAD_INPUT, UserError
from megatron.tools.text_generation_server import serve_arguments

if __name__ == "__main__":
    try:
        arguments = serve_arguments(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(main(["serve", *arguments]))
