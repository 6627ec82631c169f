"""``tools/serve.py`` as a process: from its first line to Ctrl-C."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.test_utils.hf_folders import tiny_llama
from tests.test_utils.tiny_tokenizers import byte_level_bpe

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_served_folder_answers_until_ctrl_c(warm_python, tmp_path):
    tiny_llama(tmp_path, vocab_size=400)
    byte_level_bpe(tmp_path / "tokenizer.json", 400)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    command = [warm_python, ROOT / "tools" / "serve.py", "--load", tmp_path, "--model-name", "mine", "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        line = program.stdout.readline()
        assert line.startswith("serving mine on http://127.0.0.1:"), program.stderr.read()
        url = line.split()[3]
        form = {"prompt": "def", "max_tokens": 5, "model": "mine"}
        answer = httpx.post(f"{url}/v1/completions", json=form, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 5
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0, program.stderr.read()
    with socket.create_server(("127.0.0.1", 0)) as selected:
        port = str(selected.getsockname()[1])
        refused = subprocess.run([*command, port], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and f"--port {port}: cannot listen" in refused.stderr
