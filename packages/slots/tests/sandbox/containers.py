"""Ordinary containers for tests: a docker daemon started by hand, and this machine's own programs as the image.

The container has docker's default privileges and no network. Its file system is an empty root, with this machine's
`/usr`, the interpreter and the checkout mounted read-only, so nothing is built or fetched and it starts in a second.
A daemon is started only by root and where `dockerd` is installed (`apt-get install docker.io`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

_PATH = ":".join(f"{ROOT}/{folder}" for folder in ("src", "packages/slots/src", "packages/slots/tests", "tests"))
_READY_S = 20.0
IMAGE = "palaestra-tests:1"


@contextlib.contextmanager
def own_bridge(address: str) -> Iterator[str]:
    """The name of a bridge with this address, for a daemon: the one that a daemon makes would stay."""
    name = f"br{os.getpid()}"
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", address, "dev", name], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], check=True)


@contextlib.contextmanager
def docker(*network: str) -> Iterator[Docker]:
    """A daemon of our own, ended with everything in it. It has no network of its own, unless options give it one. Skips
    the test where there can be none."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("needs root and dockerd (apt-get install docker.io)")
    with tempfile.TemporaryDirectory(prefix="palaestra-docker-", ignore_cleanup_errors=True) as folder:
        options = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-p", f"{folder}/pid"]
        options += ["-H", f"unix://{folder}/socket", "--iptables=false", "--ip6tables=false"]
        options += network or ["--bridge=none"]
        client = Docker(f"unix://{folder}/socket", ["dockerd", *options], Path(folder, "log"))
        try:
            if not client.start():
                pytest.skip(f"dockerd does not start here: {client.log.read_text()[-300:].strip()}")
            client.make_image(Path(folder) / "root")
            yield client
        finally:
            client.stop()
            for mount in ("data", "exec/netns/default"):
                subprocess.run(["umount", "-R", "-q", f"{folder}/{mount}"], check=False, capture_output=True)


class Docker:
    """A running daemon."""

    daemon: subprocess.Popen[bytes]

    def __init__(self, address: str, command: list[str], log: Path) -> None:
        self.address, self.log = address, log
        self._command = command
        self._docker = ["docker", "-H", address]

    def start(self) -> bool:
        """Start the daemon, and wait until it answers; False when it has ended instead."""
        with self.log.open("a") as log:
            self.daemon = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        return self._wait()

    def stop(self) -> None:
        """End the daemon with its containers."""
        self.daemon.terminate()
        self.daemon.wait(30)

    @property
    def command(self) -> str:
        """The command line that reaches it."""
        return " ".join(self._docker)

    def load(self, root: Path, name: str) -> None:
        """Make a directory an image."""
        archive = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
        subprocess.run([*self._docker, "import", "-", name], input=archive, capture_output=True, check=True)

    def _wait(self) -> bool:
        command = [*self._docker, "events", "--since", "0", "--until", "1"]
        for _ in range(int(_READY_S / 0.2)):
            if subprocess.run(command, capture_output=True).returncode == 0:
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.wait(0.2)
                return False
        return False

    def make_image(self, root: Path) -> None:
        """A root with the usual directories and links, two users, and a secret."""
        for name in ("usr", "etc", "proc", "dev", "sys", "run", "home", "root", "tmp", "var/tmp"):
            (root / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (root / name).chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if os.path.islink(f"/{name}"):
                (root / name).symlink_to(os.readlink(f"/{name}"))
        (root / "etc/os-release").write_text('NAME="A container"\n')
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nsomebody:x:12345:12345::/home:/bin/bash\n")
        (root / "etc/shadow").write_text("root:secret\n")
        (root / "etc/shadow").chmod(0o600)
        self.load(root, IMAGE)

    def python(self, *arguments: str, options: tuple[str, ...] = (), timeout_s: float = 170) -> str:
        """The output of this interpreter, with this checkout, in a new container; fails with it."""
        prefix = os.path.realpath(sys.base_prefix)
        mounts = {"/usr", prefix, str(ROOT), sys.prefix, "/etc/ld.so.cache", "/etc/alternatives"} | {
            f"/{name}"
            for name in ("bin", "sbin", "lib", "lib64")
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
        }
        outer = [path for path in sorted(mounts) if os.path.exists(path) and not path.startswith("/usr/")]
        volumes = [word for path in outer for word in ("-v", f"{path}:{path}:ro")]
        env = ["-e", f"PYTHONPATH={_PATH}", "-e", "PYTHONDONTWRITEBYTECODE=1"]
        command = [*self._docker, "run", "--rm", "--network", "none", "-w", str(ROOT), *volumes, *env, *options, IMAGE]
        result = subprocess.run(
            [*command, sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
        return result.stdout
