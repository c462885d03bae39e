"""Model servers of others with a small model in float32, which can be killed and started: vLLM of `.venv-vllm`
(`scripts/vllm_env`) and llama.cpp of `.venv-llama` (`scripts/llama_env`)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from chat.chat_process import environment
from real_models.doors import FILES_ENV, ONE_CALL, ROOT, palaestra

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LLAMA_SERVER = ROOT / ".venv-llama" / "bin" / "llama-server"
LLAMA_MODEL = ROOT / ".venv-llama" / "smollm2.gguf"
NAME = "small"
"""The model's name at the server, which is no folder."""
WINDOW = 4096
DTYPE = os.environ.get("VLLM_DTYPE", "float32")
_START_S = 400.0


class ModelServer:
    """A server at one port, whose output is in `log`. Subclasses say how it is started."""

    variables: ClassVar[Mapping[str, str]] = {}

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.model, self.log = model, log
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        # PYTHONPATH may name packages of other versions than those of the environment.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
        variables = {**inherited, "OMP_NUM_THREADS": str(os.cpu_count()), **self.variables}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command(), env=variables, stdout=output, stderr=output, start_new_session=True
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """Kill the server and its workers, as a machine does that runs out of memory."""
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as page:
                return bool(page.status == 200)
        except OSError:
            return False


class VLLMServer(ModelServer):
    """vLLM on the processor, with the routes that load weights."""

    variables: ClassVar[Mapping[str, str]] = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_COMPILE_DISABLE": "1",  # or the first request with log-probabilities runs g++, also with --enforce-eager
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }

    def command(self) -> list[str]:
        return [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", DTYPE, "--max-model-len", str(WINDOW), "--max-num-seqs", "32", "--enforce-eager"),
            *("--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ]

    def metric(self, name: str) -> float:
        """Return the sum of a counter of `/metrics`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            lines = [line.split() for line in page.read().decode().splitlines() if line.startswith(f"{name}{{")]
        return sum(float(value) for _, value in lines)


class LlamaServer(ModelServer):
    """llama.cpp, with a window of its own for each of eight conversations."""

    def command(self) -> list[str]:
        return [
            *(str(LLAMA_SERVER), "--model", str(self.model), "--alias", NAME, "--host", "127.0.0.1"),
            *("--port", str(self.port), "--parallel", "8", "--ctx-size", str(8 * WINDOW), "--no-kv-unified", "--no-ui"),
        ]


def run_past_a_killed_server(folder: Path, server: ModelServer, *words: str) -> None:
    """Run twelve groups of four, kill the server after the first group, start it, and resume the run if it ended."""
    words = ("run", FILES_ENV, *words, "--tasks", "12", "--group", "4", "--concurrency", "2", *ONE_CALL)
    output = folder / "output"
    with (
        output.open("wb") as stream,
        subprocess.Popen(
            [sys.executable, "-m", "palaestra", *words], cwd=folder, env=environment(folder), stdout=stream,
            stderr=stream,
        ) as running,
    ):  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not any(file.stat().st_size for file in folder.glob("runs/*/*/groups.jsonl")):
                assert time.monotonic() < until, output.read_text()
                time.sleep(0.1)
            server.kill()
            server.start()
            code = running.wait(400)
        finally:
            running.kill()
    print(f"the run waited and ended with {code}" if code == 0 else "the run ended, and was resumed")
    if code != 0:
        palaestra(folder, "resume", "last")
