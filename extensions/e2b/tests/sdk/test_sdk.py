"""The E2B SDKs for Python and JavaScript, unmodified, against our server: `make e2b`.

The program of operations prints what E2B documents for each; both languages print the same transcript.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.server import RunningE2B

from ..conftest import FIRST, a_server

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
PYTHON, JS = ROOT / ".venv-e2b" / "bin" / "python", ROOT / ".venv-e2b" / "js"
NODE = shutil.which("node")
needs_python = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-e2b: run `make e2b`")
needs_js = pytest.mark.skipif(
    NODE is None or not (JS / "node_modules" / "e2b").exists(), reason="needs node and .venv-e2b/js: run `make e2b`"
)
pytestmark = [pytest.mark.slots, pytest.mark.interop, pytest.mark.timeout(300)]

LANGUAGES = [pytest.param("python", marks=needs_python), pytest.param("javascript", marks=needs_js)]


@pytest.fixture(scope="module")
def sdk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningE2B]:
    with a_server(ApiKey("sdk", FIRST), folder=tmp_path_factory.mktemp("state")) as running:
        yield running


def run(language: str, program: str, variables: Mapping[str, str], cwd: Path | None = None) -> str:
    """Run a program with the SDK's variables, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    if language == "python":
        command, folder = [str(PYTHON), "-"], cwd
    else:
        command, folder = [str(NODE), "--input-type=module", "-"], JS
    done = subprocess.run(
        command, input=program, env={**clean, **variables, "PYTHONUTF8": "1"}, cwd=folder, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def direct(server: RunningE2B) -> dict[str, str]:
    return {"E2B_API_KEY": FIRST, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_operations_have_their_documented_results(language: str, sdk_server: RunningE2B) -> None:
    program = (HERE / ("operations.py" if language == "python" else "operations.mjs")).read_text()
    found = run(language, program, direct(sdk_server)).splitlines()
    assert found == (HERE / "transcript.txt").read_text().splitlines()
    assert len(found) >= 60
    assert len(sdk_server.sandboxes) == 0


ASYNC = """
import asyncio
from e2b import AsyncSandbox

async def main():
    boxes = await asyncio.gather(*(AsyncSandbox.create(timeout=60) for _ in range(8)))
    results = await asyncio.gather(*(box.commands.run(f"echo {n}") for n, box in enumerate(boxes)))
    print(*(result.stdout.strip() for result in results))
    events = []
    watch = await boxes[0].files.watch_dir("/home/user", on_event=lambda event: events.append(event.name))
    await boxes[0].files.write("seen", "x")
    while "seen" not in events:
        await asyncio.sleep(0.05)
    await watch.stop()
    handle = await boxes[1].commands.run("cat", background=True, stdin=True)
    await boxes[1].commands.send_stdin(handle.pid, "ab")
    await handle.close_stdin()
    print((await handle.wait()).stdout)
    print(all(await asyncio.gather(*(box.kill() for box in boxes))))

asyncio.run(main())
"""


@needs_python
def test_the_asynchronous_sdk_works_concurrently(sdk_server: RunningE2B) -> None:
    assert run("python", ASYNC, direct(sdk_server)).split() == [*map(str, range(8)), "ab", "True"]


BUILD = """
from e2b import BuildException, Sandbox, Template
info = Template.build(Template(file_context_path=".").from_dockerfile("Dockerfile"), "from-dockerfile")
box = Sandbox.create("from-dockerfile", timeout=60)
print(box.commands.run("pwd; cat greeting").stdout.split())
box.kill()
for template in (Template().from_image("python:3.12"), Template().from_template("base").run_cmd("exit 5")):
    try:
        Template.build(template, "refused")
    except BuildException as error:
        print("refused", "python:3.12" in str(error), "exit code: 5" in str(error))
"""


@needs_python
def test_a_dockerfile_becomes_a_template(sdk_server: RunningE2B, tmp_path: Path) -> None:
    (tmp_path / "part").write_text("world\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM e2bdev/base\nENV WORD=hello\nWORKDIR /srv\nCOPY part /srv/part\nRUN echo $WORD $(cat part) > greeting\n"
    )
    found = run("python", BUILD, direct(sdk_server), tmp_path).splitlines()
    assert found == ["['/srv', 'hello', 'world']", "refused True False", "refused False True"]


DOMAIN = {
    "python": """
from e2b import Sandbox
box = Sandbox.create(timeout=60)
with open("/etc/hosts", "a") as hosts:
    hosts.write(f"127.0.0.1 49983-{box.sandbox_id}.e2b.localhost\\n")
print(box.commands.run("echo secure").stdout.strip())
box.kill()
""",
    "javascript": """
import { Sandbox } from 'e2b'
import { appendFileSync } from 'fs'
const box = await Sandbox.create({ timeoutMs: 60000 })
appendFileSync('/etc/hosts', `127.0.0.1 49983-${box.sandboxId}.e2b.localhost\\n`)
console.log((await box.commands.run('echo secure')).stdout.trim())
await box.kill()
""",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace with its own /etc/hosts")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_local_domain_with_our_certificate_works(language: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 api.e2b.localhost\n")
    command = [sys.executable, "-m", "palaestra", "serve", "e2b", "--port", "0", "--tls-port", "0", "--no-network",
               "--domain", "e2b.localhost", "--state", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = next(line for line in server.stderr if line.startswith("HTTPS at ")).split()[2].rpartition(":")[2]
            own = [*command[:5], "--env", "--domain", "e2b.localhost", "--tls-port", port, "--state", str(tmp_path)]
            printed = subprocess.run(own, capture_output=True, text=True, check=True).stdout
            (tmp_path / "env").write_text(printed)
            (tmp_path / "program").write_text(DOMAIN[language])
            runner = f"{PYTHON} -" if language == "python" else f"cd {JS} && {NODE} --input-type=module -"
            script = f". {tmp_path}/env; mount --bind {hosts} /etc/hosts; {runner} < {tmp_path}/program"
            done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=120)
            assert done.stdout == "secure\n", done.stderr
        finally:
            server.terminate()
            server.wait(20)
