"""Load test of the server: hostile connections, poisoned requests, a stopped rank, signals under load.

    python tests/torture/server.py [--rounds 1] [--kinds idle,poison,frozen,frozen_first,signals]

Each kind starts ``megatron serve`` on a tiny model as a process (``frozen`` kinds: two ranks of torchrun), to which
other clients send requests all the time. It prints their results, and fails if a client was not served, an error is not
OpenAI's error object, the process stays or logs a traceback, or the log reaches 1 MB.
"""

import argparse
import asyncio
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BAD = 90  # token with NaN in its embedding
MAX_LOG = 2**20
LIMIT = 8  # --watchdog-timeout-seconds of the frozen rank


class Failure(Exception):
    """A requirement that does not hold."""


def require(condition, text):
    if not condition:
        raise Failure(text)


def write_model(folder):
    """A Hugging Face folder with a random Llama whose token BAD has NaN."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.test_utils.hf_folders import tiny_llama
    from tests.test_utils.tiny_tokenizers import byte_level_bpe

    tiny_llama(folder, vocab_size=400)
    byte_level_bpe(folder / "tokenizer.json", 400)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][BAD] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})


@contextmanager
def server(folder, log, *flags, ranks=1, descriptors=None):
    """Yield (process, address) of a server."""
    command = [sys.executable, "-m", "megatron", "serve", "--load", folder, "--port", "0", *flags]
    if ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
        command[1:2] = [*launcher, "-m"]

    def limit():
        os.setsid()
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=limit, env=environment, cwd=ROOT)
    try:
        end = time.monotonic() + 120
        while b"serving" not in log.read_bytes():
            require(process.poll() is None and time.monotonic() < end, f"no start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        line = next(line for line in log.read_text().splitlines() if "serving " in line)
        yield process, "http:" + line.split("http:")[1].split()[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Clients:
    """Clients that send requests until :meth:`stop`; outcomes, and seconds of the answers."""

    def __init__(self, url, count=4, seed=0, **body):
        self.url, self.outcomes, self.seconds, self.problems = url, Counter(), [], []
        self._rng, self._body, self._stopping = random.Random(seed), body, False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def _run(self):
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while not self._stopping:
                stream = self._rng.random() < 0.5
                prompt = self._rng.choice(("Once upon", "b", "def main"))
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": stream}
                began = time.monotonic()
                try:
                    answer = await client.post("/v1/completions", json={**body, **self._body})
                except httpx.HTTPError as error:
                    self.outcomes[type(error).__name__] += 1
                    await asyncio.sleep(0.2)
                    continue
                self.seconds.append(time.monotonic() - began)
                self._check(answer, stream)

    def _check(self, answer, stream):
        outcome = str(answer.status_code)
        if answer.status_code != 200:
            if "message" not in answer.json().get("error", {}):
                self.problems.append(answer.text)
        elif stream:
            if not answer.text.endswith("data: [DONE]\n\n"):
                self.problems.append(answer.text[-200:])
            if '"error"' in answer.text:
                outcome = "200 with an error event"
        self.outcomes[outcome] += 1

    async def stop(self):
        self._stopping = True
        await asyncio.gather(*self._tasks)
        require(not self.problems, f"answers without form: {self.problems[:3]}")

    def text(self):
        times = sorted(self.seconds) or [0.0]
        median, max_length = statistics.median(times), times[-1]
        return f"{dict(self.outcomes)}, {median:.3f} s in the median, {max_length:.2f} s at most"


def check_log(log, *allowed):
    text, size = log.read_text(errors="replace"), log.stat().st_size
    require(size < MAX_LOG, f"the log has {size} bytes")
    require("Traceback" not in text or any(word in text for word in allowed), f"a traceback: {text[-3000:]}")
    return f"log {size} bytes"


async def wait_for_exit(process, seconds):
    began = time.monotonic()
    while process.poll() is None:
        require(time.monotonic() - began < seconds, f"the process runs {seconds} s later")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def idle(folder, log):
    """2,000 idle or half-sent connections at 1,024 descriptors."""
    with server(folder, log, descriptors=1024) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        clients = Clients(url)
        await asyncio.sleep(2)
        half = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        half += b"Content-Length: 99\r\n\r\n{"
        sockets = []

        def connect():
            for number in range(2000):
                sockets.append(socket.create_connection((host, int(port)), timeout=30))
                with suppress(ConnectionError):
                    sockets[-1].sendall((b"", b"GET /hea", half)[number % 3])

        await asyncio.to_thread(connect)
        await asyncio.sleep(10)
        await clients.stop()
        bad = {name: count for name, count in clients.outcomes.items() if name != "200"}
        require(not bad and clients.outcomes["200"] > 20, f"other clients: {clients.text()}")
        process.send_signal(signal.SIGTERM)
        seconds = await wait_for_exit(process, 15)
        for each in sockets:
            each.close()
        require(process.returncode == 0, f"exit code {process.returncode}")
        print(f"idle: others {clients.text()}; end in {seconds:.1f} s; {check_log(log)}")


async def poison(folder, log):
    """Requests without finite logits between others."""
    with server(folder, log) as (process, url):
        clients, bad = Clients(url), Clients(url, 2, prompt=[BAD, 5, 7])
        await asyncio.sleep(10)
        await bad.stop()
        await clients.stop()
        require(set(clients.outcomes) == {"200"}, f"other clients: {clients.text()}")
        require(set(bad.outcomes) == {"500"}, f"poisoned requests: {bad.text()}")
        process.send_signal(signal.SIGINT)
        await wait_for_exit(process, 15)
        require(process.returncode == 0, f"exit code {process.returncode}")
        print(f"poison: others {clients.text()}; poisoned {bad.text()}; {check_log(log)}")


async def frozen(folder, log):
    """SIGSTOP to rank 1 of two."""
    with server(folder, log, "--watchdog-timeout-seconds", str(LIMIT), ranks=2) as (process, url):
        clients = Clients(url)
        await asyncio.sleep(3)
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        ranks = [int(each) for each in children.stdout.split()]
        second = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(second, signal.SIGSTOP)
        began, reason = time.monotonic(), None
        while reason is None:
            require(time.monotonic() - began < LIMIT + 5, "/health says ok")
            with suppress(httpx.HTTPError):
                answer = httpx.get(url + "/health", timeout=5)
                reason = answer.json()["error"]["message"] if answer.status_code == 503 else None
            await asyncio.sleep(0.1)
        noticed = time.monotonic() - began
        clients._stopping = True
        await clients.stop()
        require(clients.outcomes["503"], f"open requests: {clients.text()}")
        first = next(pid for pid in ranks if pid != second)
        while Path(f"/proc/{first}").exists() and "Z" not in Path(f"/proc/{first}/stat").read_text().split()[2]:
            require(time.monotonic() - began < LIMIT + 30, "rank 0 stays")
            await asyncio.sleep(0.1)
        ended = time.monotonic() - began
        await wait_for_exit(process, 60)
        require(process.returncode == 1, f"exit code {process.returncode}")
        print(
            f"frozen: limit {LIMIT} s, noticed after {noticed:.1f} s ({reason}); rank 0 ended after {ended:.1f} s; "
            f"clients {clients.text()}; {check_log(log, 'ChildFailedError')}"
        )


async def frozen_first(folder, log):
    """SIGSTOP to rank 0 of two: rank 1 ends, and torchrun kills rank 0."""
    with server(folder, log, "--watchdog-timeout-seconds", str(LIMIT), ranks=2) as (process, _):
        await asyncio.sleep(3)
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        ranks = [int(pid) for pid in children.stdout.split()]
        first = next(pid for pid in ranks if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        await wait_for_exit(process, LIMIT + 60)
        require(process.returncode == 1, f"exit code {process.returncode}")
        require("rank 0 sends nothing" in log.read_text(), "no reason in the log")
        print(f"frozen_first: limit {LIMIT} s, all processes ended after {time.monotonic() - began:.1f} s")


async def signals(folder, log, number):
    """A signal while requests run that take longer than the grace period."""
    with server(folder, log) as (process, url):
        clients = Clients(url)
        slow = Clients(url, 24, max_tokens=10**6, ignore_eos=True, n=16)
        await asyncio.sleep(3)
        process.send_signal(number)
        seconds = await wait_for_exit(process, 20)
        await slow.stop()
        await clients.stop()
        require(process.returncode == 0, f"exit code {process.returncode}")
        found = {name for each in (clients, slow) for name in each.outcomes}
        allowed = {"200", "200 with an error event", "503", "429", "ConnectError", "RemoteProtocolError", "ReadError"}
        require(found <= allowed, f"outcomes {found}")
        require(slow.outcomes["503"] + slow.outcomes["200 with an error event"], f"long requests {slow.text()}")
        name = signal.Signals(number).name
        print(
            f"signals: {name} ends in {seconds:.1f} s; clients {clients.text()}; long requests {slow.text()}; "
            f"{check_log(log)}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", default="idle,poison,frozen,frozen_first,signals")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    folder = Path(tempfile.mkdtemp(prefix="torture-server-"))
    model, failures = folder / "model", 0
    model.mkdir()
    write_model(model)
    for round_number in range(options.rounds):
        for kind in options.kinds.split(","):
            runs = [(signals, signal.SIGTERM), (signals, signal.SIGINT)] if kind == "signals" else [(globals()[kind],)]
            for number, (case, *arguments) in enumerate(runs):
                log = folder / f"{kind}-{round_number}-{number}.log"
                try:
                    asyncio.run(case(model, log, *arguments))
                except Failure as error:
                    failures += 1
                    print(f"FAILED {kind}: {error}; log in {log}")
    print(f"{failures} failures")
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
