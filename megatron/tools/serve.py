"""Serve a GPT checkpoint over HTTP with OpenAI's interface.

    python tools/serve.py --load RUN/checkpoints
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def main():"}'

On several GPUs: torchrun --nproc-per-node 2 -m megatron serve --load RUN/checkpoints Only programs on this machine can
connect; another --host requires a token: a file (--token-file FILE), or the environment variable MEGATRON_SERVE_TOKEN.
A chat page is at http://127.0.0.1:8000/. Requires: pip install starlette uvicorn"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.inference.server.memory import limit_arenas
from megatron.tools.engine_flags import add_engine_flags, load_gpt, on_first_rank

if TYPE_CHECKING:
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.server.image_parts import ImageParts
    from megatron.training.trained_model import TrainedModel

MAX_BODY_BYTES = 4 * 2**20
MAX_IMAGE_BODY_BYTES = 32 * 2**20
"""Of models that read images: base64 takes 4 bytes for 3."""
TOKEN_VARIABLE = "MEGATRON_SERVE_TOKEN"
END_SECONDS = 15
"""Time that the ranks have to end together."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's flags (only --load is required)."""
    parser = tool_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    add_engine_flags(parser)
    parser.add_argument("--model-name", metavar="NAME", help="name in requests; default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: any free one")
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"file with the secret that requests must send; default: {TOKEN_VARIABLE}"
    )
    parser.add_argument("--token", help="the secret itself, which other users of this machine see in the process list")
    parser.add_argument("--max-sequences", type=int, default=64, metavar="N", help="texts generated at the same time")
    parser.add_argument("--max-requests", type=int, default=512, metavar="N", help="texts that wait or are generated")
    parser.add_argument("--max-prompts", type=int, default=128, metavar="N", help="texts of one request")
    parser.add_argument(
        "--allowed-image-folder",
        metavar="DIR",
        help="folder whose images requests may name by file URLs; default: none",
    )
    parser.add_argument(
        "--watchdog-timeout-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="end if the engine, or another rank, makes no progress for this time; 0: never",
    )
    return parser


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    for name in ("max_sequences", "max_requests", "max_prompts"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port {args.port}: must be between 0 and 65535")
    if args.watchdog_timeout_seconds != 0 and not 1 <= args.watchdog_timeout_seconds <= 10**6:
        raise UserError(f"--watchdog-timeout-seconds {args.watchdog_timeout_seconds}: must be 0, or 1 to 1000000")
    if args.allowed_image_folder is not None and not Path(args.allowed_image_folder).is_dir():
        raise UserError(f"--allowed-image-folder {args.allowed_image_folder}: is no folder; give an existing one")
    args.token = read_token(args)
    if not is_loopback(args.host) and args.token is None:
        raise UserError(f"--host {args.host}: other machines can connect; add --token-file FILE")
    return args


def read_token(args: argparse.Namespace) -> str | None:
    """Return the secret, or None. Raises UserError for an unreadable file or text that no HTTP header has."""
    if args.token_file is not None and args.token is not None:
        raise UserError("--token: must not be given with --token-file; remove it")
    source, token = "--token", args.token
    if args.token_file is not None:
        source = f"--token-file {args.token_file}"
        try:
            token = Path(args.token_file).read_bytes()[: 2**16].decode("latin-1").strip()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror})") from error
    elif token is None and TOKEN_VARIABLE in os.environ:
        source, token = TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE]
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise UserError(f"{source}: must have a secret of letters, digits and signs, without spaces; write one into it")
    return token


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str]) -> int:
    """Serve the checkpoint of the command line ``argv`` until Ctrl-C; return the exit code."""
    args = parse_command_line(argv)
    limit_arenas()
    try:
        import_module("megatron.core.inference.server.app")
    except ImportError as error:
        command = "pip install starlette uvicorn"
        raise UserError(f"the server needs packages that cannot be imported ({error}); {command}") from error
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.scheduler import Limits

    trained = load_gpt(args, images=True)
    limits = Limits(trained.cfg.data.seq_length, max_sequences=args.max_sequences)
    progress = Progress(args.watchdog_timeout_seconds)
    graphs = args.cuda_graph_impl == "local"
    engine = Engine(trained.model, limits, cuda_graphs=graphs, on_step=progress.mark)
    if not engine.is_first_rank:  # a signal to all ranks ends rank 0, which then ends the others
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        progress.watch()
    return on_first_rank(engine, lambda: serve(engine, trained, args)) or 0


class Progress:
    """Ends a rank that has received nothing from rank 0 for ``limit`` seconds (0: never): rank 0 is stopped or lost,
    and the collectives would wait for their own time limit. Rank 0 sends a sign of life every ``limit / 4`` s."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.mark()

    def mark(self) -> None:
        """Note that rank 0 is alive."""
        self._last = time.monotonic()

    def watch(self) -> threading.Thread | None:
        """Start the thread that ends the process with code 1, and return it; None without a limit."""
        self.mark()
        if not self._limit:
            return None
        thread = threading.Thread(target=self._run, name="watch of rank 0", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while time.monotonic() - self._last <= self._limit:
            time.sleep(self._limit / 20)
        sys.stderr.write(f"error: rank 0 sends nothing since {self._limit:g} s: it is stopped or lost\n")
        _exit_at_once()


def image_parts(trained: TrainedModel, folder: str | None) -> ImageParts | None:
    """Return the reader of images of requests; None for a model of text. UserError for a useless ``folder``."""
    from megatron.core.inference.server.image_parts import ImageParts

    loader = trained.image_loader
    if loader is None and folder is not None:
        raise UserError(f"--allowed-image-folder {folder}: the model reads text only; remove it")
    return None if loader is None else ImageParts(loader, folder)


def serve(engine: Engine, trained: TrainedModel, args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, on rank 0. After a failure of the engine the process ends here with code 1."""
    from megatron.core.inference.server import app
    from megatron.core.inference.server.protocol import Model
    from megatron.core.inference.server.service import EngineService

    length = engine.scheduler.limits.max_length
    name = args.model_name or Path(args.load).resolve().name
    images = image_parts(trained, args.allowed_image_folder)
    description = Model(name, trained.tokenizer, length, min(args.max_prompts, args.max_requests), images)
    service = EngineService(engine, args.max_requests, args.watchdog_timeout_seconds)
    server = app.Server(service, description, MAX_BODY_BYTES if images is None else MAX_IMAGE_BODY_BYTES)
    try:
        listening = app.listen(args.host, args.port)
    except OSError as error:
        raise UserError(
            f"--host {args.host} --port {args.port}: cannot listen ({error.strerror}); use another"
        ) from error
    with listening, suppress(KeyboardInterrupt):
        program, started = app.build_program(server, args.token), time.monotonic()
        if count := engine.record_graphs():
            print(f"recorded {count} CUDA graphs in {time.monotonic() - started:.1f} s", flush=True)
        address = f"[{args.host}]" if ":" in args.host else args.host
        print(f"serving {name} on http://{address}:{listening.getsockname()[1]} (Ctrl-C ends it)", flush=True)
        program.run([listening])
    if service.failure is not None and service.failure.is_fault:
        sys.stderr.write(f"error: {service.failure}\n")
        _exit_at_once()
    # a stopped rank does not answer the collectives of the end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(END_SECONDS if engine.num_ranks > 1 else 0)
    return 0


def _exit_at_once() -> NoReturn:
    """Without its threads and process groups: these may wait for another rank forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
