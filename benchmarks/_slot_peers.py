"""The peers of `slots.py`. Each peer runs `bash -c true` once per sample and returns the seconds that this took.

A peer that this machine lacks raises `Absent` with the reason, which the table shows. Peers are warm when they are
measured: the container runs, the session is open. Only bubblewrap creates its sandbox for each sample, because it has
no other mode. The peers `docker run` start a container and run no command in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
TRUE = ["/bin/bash", "-c", "true"]
QUIET = (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)

Peer = Callable[[], float]
"""Runs the command once and returns the seconds."""


class Absent(Exception):
    """A peer cannot be measured on this machine; the message gives the reason."""


def floor() -> float:
    """Measure the floor: a bare `posix_spawn` of `bash -c true`, until the process has ended."""
    started = time.perf_counter()
    os.waitpid(os.posix_spawn(TRUE[0], TRUE, ENVIRONMENT), 0)
    return time.perf_counter() - started


def timed(command: list[str], environment: Mapping[str, str] = ENVIRONMENT) -> float:
    """Measure a bare `posix_spawn` of any program, which must succeed."""
    started = time.perf_counter()
    pid = os.posix_spawn(command[0], command, environment, file_actions=[QUIET])
    _, status = os.waitpid(pid, 0)
    elapsed = time.perf_counter() - started
    if status:
        raise Absent(f"{command[0]} ended with status {os.waitstatus_to_exitcode(status)}")
    return elapsed


@contextmanager
def bubblewrap() -> Iterator[Peer]:
    """Use all namespaces, the host's /usr read-only and a private /tmp, without limits, a system call filter or a
    writable workspace."""
    program = shutil.which("bwrap")
    if program is None:
        raise Absent("bwrap is not installed (apt-get install bubblewrap)")
    links = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    options = ["--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", *links]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    yield lambda: timed([program, *options, *TRUE])


PREPARED_FILES = (5_000, 50_000)
"""The number of files in the prepared workspaces, which `slots.py` forks."""

IMAGE, PREPARED = "slot-peer:1", "slot-peer:prepared"


@contextmanager
def docker() -> Iterator[tuple[str, dict[str, str]]]:
    """Run a separate daemon that has the image `IMAGE`, and yield the program `docker` and its variables."""
    program, daemon = shutil.which("docker"), shutil.which("dockerd")
    if program is None or daemon is None or os.geteuid() != 0:
        raise Absent("needs root, docker and dockerd (apt-get install docker.io)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        stack.enter_context(_daemon(daemon, folder))
        environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/d.sock"}
        _docker([program, "import", "-", IMAGE], environment, stdin=_minimal_root(folder))
        yield program, environment


@contextmanager
def docker_exec() -> Iterator[Peer]:
    """Run `docker exec` from the command line, in a running container without a network."""
    with docker() as (program, environment):
        container = _docker([program, "run", "-d", "--network", "none", IMAGE, "/bin/sleep", "100000"], environment)
        try:
            yield lambda: timed([program, "exec", container, *TRUE], environment)
        finally:
            _docker([program, "rm", "-f", container], environment)


@contextmanager
def docker_run(files: int) -> Iterator[Peer]:
    """Start a container of an image that contains a workspace with this many files, and remove it outside the timed
    part."""
    with docker() as (program, environment):
        prepare = f"for i in {{1..{files}}}; do echo $i > $i; done"
        create = [program, "run", "-d", "--network", "none", "--workdir", "/workspace", IMAGE, *TRUE[:2], prepare]
        container = _docker(create, environment)
        _docker([program, "wait", container], environment)
        _docker([program, "commit", container, PREPARED], environment)

        def once() -> float:
            name = f"peer-{time.time_ns()}"
            start = [program, "run", "-d", "--name", name, "--network", "none", PREPARED, "/bin/sleep", "100000"]
            elapsed = timed(start, environment)
            _docker([program, "rm", "-f", name], environment)
            return elapsed

        yield once


def _docker(command: list[str], environment: Mapping[str, str], stdin: bytes = b"") -> str:
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True)
    if done.returncode:
        raise Absent(f"{' '.join(command[:2])}: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return done.stdout.decode().strip()


@contextmanager
def _daemon(program: str, folder: Path) -> Iterator[None]:
    """Run a separate daemon without the host's configuration while the block runs."""
    options = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-H", f"unix://{folder}/d.sock"]
    options += ["-p", f"{folder}/pid", "--iptables=false", "--bridge=none"]
    with open(folder / "log", "wb") as log, subprocess.Popen([program, *options], stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 20
            while not Path(folder, "d.sock").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Absent(f"dockerd does not start: {Path(folder, 'log').read_text()[-200:].strip()}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def _minimal_root(folder: Path) -> bytes:
    """Return a tar file with this machine's bash and sleep and the libraries that they need."""
    root = folder / "root"
    for program in ("/bin/bash", "/bin/sleep"):
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
        for path in (program, *(word for word in needed if word.startswith("/"))):
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout


@contextmanager
def agent_peer(name: str, interpreter: str | None) -> Iterator[Peer]:
    """Call an agent package in a separate virtual environment over a pipe; the package's process measures the time."""
    if interpreter is None:
        raise Absent("give --peers PYTHON, an interpreter that has swe-rex and mini-swe-agent")
    script = str(Path(__file__).with_name("_agent_peer.py"))
    command = [interpreter, script, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asking, answers = process.stdin, process.stdout

        def once() -> float:
            asking.write("\n")
            asking.flush()
            return float(answers.readline())

        try:
            if answers.readline() != "ready\n":
                raise Absent(f"{name} does not start under {interpreter}")
            yield once
        finally:
            asking.close()


def peers(interpreter: str | None) -> dict[str, Callable[[], AbstractContextManager[Peer]]]:
    """Return the peers by their names in the table; entering the context of a peer starts it."""
    return {
        "bubblewrap": bubblewrap,
        "docker exec": docker_exec,
        **{f"docker run, {files} files": partial(docker_run, files) for files in PREPARED_FILES},
        "SWE-ReX run_in_session": lambda: agent_peer("swe-rex-session", interpreter),
        "SWE-ReX execute (no isolation)": lambda: agent_peer("swe-rex-execute", interpreter),
        "mini-swe-agent local (no isolation)": lambda: agent_peer("mini-swe-agent", interpreter),
    }
