"""`palaestra serve e2b` as a program: its variables, HTTPS, a kill -9, and the next start."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from golden_messages import check_message
from programs import until

from .http_client import Api

pytestmark = pytest.mark.slots
COMMAND = (sys.executable, "-m", "palaestra", "serve", "e2b")


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the program during the block, and yield it with its URL."""
    command = [*COMMAND, "--port", "0", "--state", str(folder), "--no-network", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            yield process, json.loads(line)["url"]
        finally:
            process.terminate()
            process.communicate(timeout=20)


def variables(folder: Path, *options: str) -> dict[str, str]:
    printed = subprocess.run(
        [*COMMAND, "--state", str(folder), "--env", *options], capture_output=True, text=True, check=True
    )
    pairs = (line.removeprefix("export ").split("=", 1) for line in printed.stdout.splitlines() if "=" in line)
    return {name: value.strip("'") for name, value in pairs}


def test_the_server_prints_the_command_for_its_variables(tmp_path: Path) -> None:
    command = [*COMMAND, "--port", "0", "--state", str(tmp_path), "--no-network"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        hint = next(line for line in process.stderr if "eval" in line)
        process.terminate()
        process.communicate(timeout=20)
    words = shlex.split(hint.partition("$(")[2].partition(")")[0])
    printed = subprocess.run([*COMMAND, *words[3:]], capture_output=True, text=True, check=True).stdout
    assert f"E2B_API_URL={url}" in printed
    assert (tmp_path / "keys").read_text().split()[-1] in printed
    unknown = subprocess.run([*COMMAND, "--env", "--port", "0"], capture_output=True, text=True)
    assert (unknown.returncode, "--port N" in unknown.stderr) == (2, True)


def processes_with(mark: str) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in text and str(os.getpid()) != each.parent.name:
            found.append(text)
    return found


def test_the_variables_lead_to_the_server(tmp_path: Path) -> None:
    with started(tmp_path) as (_, url):
        port = url.rpartition(":")[2]
        found = variables(tmp_path, "--port", port)
        assert found["E2B_API_URL"] == found["E2B_SANDBOX_URL"] == url
        assert Api(url, found["E2B_API_KEY"]).create().run("echo here").out == b"here\n"
        second = subprocess.run([*COMMAND, "--port", "0", "--state", str(tmp_path)], capture_output=True, text=True)
        assert second.returncode == 2
        check_message(second.stderr, tmp_path)


def test_after_kill_9_nothing_is_left_and_the_next_server_says_so(tmp_path: Path) -> None:
    mark = f"sleep 9{os.getpid()}9"
    with started(tmp_path) as (process, url):
        key = variables(tmp_path)["E2B_API_KEY"]
        box = Api(url, key).create()
        opened, found = box.start(f"{mark} & {mark}")
        next(found)
        until(lambda: processes_with(mark), "the command runs")
        process.send_signal(signal.SIGKILL)
        process.wait()
        opened.close()
        end = time.monotonic() + 5
        while left := processes_with(mark):
            assert time.monotonic() < end, left
            time.sleep(0.05)
    with started(tmp_path) as (process, url):
        api = Api(url, key)
        assert api.call("GET", "/v2/sandboxes").json == []
        assert "killed or crashed" in api.call("GET", f"/sandboxes/{box.id}").json["message"]
        inside = box.__class__(api, box.created).read("x")
        assert inside.status == 502
        assert "was not found" in inside.json["message"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl makes the certificate")
def test_a_domain_is_served_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    with started(tmp_path, "--domain", "e2b.localhost", "--tls-port", "0") as (process, url):
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("HTTPS at "))
        port = line.split()[2].rpartition(":")[2]
        found = variables(tmp_path, "--domain", "e2b.localhost", "--tls-port", port)
        assert found["E2B_DOMAIN"] == f"e2b.localhost:{port}"
        assert "E2B_API_URL" not in found
        trust = ssl.create_default_context(cafile=found["NODE_EXTRA_CA_CERTS"])
        connection = ssl.create_default_context(cafile=found["SSL_CERT_FILE"])
        assert len(connection.get_ca_certs()) >= 1
        import http.client
        import socket

        for host in ("api.e2b.localhost", "49983-ix.e2b.localhost"):
            plain = socket.create_connection(("127.0.0.1", int(port)))
            with trust.wrap_socket(plain, server_hostname=host) as secure:
                assert secure.version() in ("TLSv1.2", "TLSv1.3")
        with (
            socket.create_connection(("127.0.0.1", int(port))) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            trust.wrap_socket(plain, server_hostname="api.e2b.app")
        assert not list(tmp_path.glob("**/ca.key")), "nobody can sign another certificate with this authority"
        assert http.client.HTTPConnection  # the plain port answers too
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert answer.read() == b"ok"


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options, words in (
        (["--isolation", "none"], "need isolation"),
        (["--template", "x"], "NAME=PATH"),
        (["--template", "x=/none/here"], "does not exist"),
        (["--keys", str(tmp_path / "none")], "cannot read"),
    ):
        done = subprocess.run([*COMMAND, "--state", str(tmp_path), *options], capture_output=True, text=True)
        assert done.returncode == 2, done
        assert words in done.stderr
