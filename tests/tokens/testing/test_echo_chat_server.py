"""The fixed-answer server as a process, as the documentation starts it."""

import subprocess
import sys

from chat.chat_process import environment


def test_the_fixed_answer_server_answers_a_chat(tmp_path):
    command = [sys.executable, "-m", "palaestra_tokens.testing.echo_chat_server", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        words = ["--base-url", url, "--model", "echo", "-p", "say hello"]
        done = subprocess.run(
            ["palaestra", "chat", *words], env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    finally:
        server.terminate()
        assert server.wait(20) == 0
        server.stdout.close()
