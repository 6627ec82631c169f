"""A server with a tiny random model and a byte-level tokenizer, in a thread on a free port."""

import json
import threading
import time
from contextlib import contextmanager

import torch

from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.core.inference.server import app
from megatron.core.inference.server.protocol import Model
from megatron.core.inference.server.service import EngineService
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.tiny_tokenizers import byte_level_bpe
from tests.unit_tests.core.models.test_gpt_model import LLAMA, make_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LENGTH = 96


def tiny_tokenizer(folder):
    """A HuggingFaceTokenizer with a chat template, made in ``folder``."""
    byte_level_bpe(folder / "tokenizer.json", 400)
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return build_huggingface(str(folder))


def tiny_model(vocab_size):
    return make_model(**LLAMA, vocab_size=vocab_size, params_dtype=torch.float32, position_embedding_type="rope").eval()


@contextmanager
def running_server(
    tokenizer,
    token=None,
    max_requests=20,
    max_bytes=20_000,
    pages=80,
    model=None,
    limit=60,
    max_connections=4096,
    images=None,
):
    """Yield (its address, its service)."""
    model = model or tiny_model(tokenizer.vocab_size)
    engine = Engine(model, Limits(LENGTH, 64, 8), num_pages=pages, page_size=8)
    service = EngineService(engine, max_requests, limit)
    server = app.Server(service, Model("tiny", tokenizer, LENGTH, 8, images), max_bytes)
    program = app.build_program(server, token, max_connections)
    service.program = program  # for tests that end it
    with app.listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=program.run, args=([listening],), daemon=True)
        thread.start()
        try:
            wait(lambda: program.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", service
        finally:
            program.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def wait(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
