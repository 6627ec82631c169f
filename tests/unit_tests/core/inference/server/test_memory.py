"""Large answers release their memory: no fragments of Python objects, no free memory in arenas of threads."""

import json
import subprocess
import sys

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.inference import engine  # noqa: E402
from megatron.core.inference.requests import TokenScore  # noqa: E402
from megatron.core.inference.server import answers, app  # noqa: E402
from tests.test_utils.model_server import running_server, tiny_tokenizer, wait  # noqa: E402

THREADS = """
import resource, sys, threading
from megatron.core.inference.server.memory import limit_arenas, release_memory
if sys.argv[1] == "limited":
    limit_arenas()
size = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
bytearray(30 * 2**20)  # glibc keeps up to twice the largest block that was freed
barrier, first = threading.Barrier(8), []
def write():
    barrier.wait()
    parts = [b"x" * (50_000 + n) for n in range(400)]
    barrier.wait()
    parts.clear()
    barrier.wait()
before = size()
threads = [threading.Thread(target=write) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
release_memory()
print(size() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.parametrize(("kind", "is_small"), [("limited", True), ("as it is", False)])
def test_threads_leave_no_memory_in_their_arenas(kind, is_small):
    run = subprocess.run([sys.executable, "-c", THREADS, kind], capture_output=True, text=True, check=True)
    megabytes = float(run.stdout)
    assert (megabytes < 5) if is_small else (megabytes > 15), "160 MB were allocated and freed"


def test_scores_of_complete_choices_are_released_before_the_answer_is_complete(tmp_path, monkeypatch):
    """Millions of small objects at the same time would leave memory in fragments."""
    counts, encode, created, deleted = [], answers.Answer.encode, [], []

    class CountedScore(TokenScore):
        def __new__(cls, *values):
            created.append(None)
            return super().__new__(cls, *values)

        def __del__(self):
            deleted.append(None)

    def counted(self, choice, text):
        result = encode(self, choice, text)
        counts.append(len(created) - len(deleted))
        return result

    for module in (engine, answers):
        monkeypatch.setattr(module, "TokenScore", CountedScore)
    monkeypatch.setattr(answers.Answer, "encode", counted)
    released = []
    monkeypatch.setattr(app, "release_memory", lambda: released.append(True))
    monkeypatch.setattr(app, "LARGE_ANSWER", 1000)
    monkeypatch.setattr(app, "RELEASE_SECONDS", 0.05)
    with running_server(tiny_tokenizer(tmp_path)) as (url, _):
        body = {"prompt": [[5 + n] * 60 for n in range(8)], "max_tokens": 2, "echo": True, "logprobs": 5}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        wait(lambda: released)
    choices = json.loads(answer.content)["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    assert all(len(choice["logprobs"]["tokens"]) == 62 for choice in choices)
    assert len(created) >= 8 * 61 and len(counts) == 8 and counts[-1] < 100, counts
