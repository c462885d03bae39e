"""The generated lower of a slot without an image: the top-level directories and an `/etc` of our own.

Of the host's `/etc` only named things are copied, and of those only files that any user of the host may read: what
programs need to link, to find fonts, time zones and certificates. No accounts, no keys, no host name, no resolver.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterable

from .. import syscalls

_COPIED = (
    "alternatives", "ca-certificates.conf", "crypto-policies", "debian_version", "fonts", "gai.conf", "host.conf",
    "java*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld-musl-*.path", "locale.alias", "locale.conf", "localtime",
    "lsb-release", "magic", "magic.mime", "mime.types", "netconfig", "networks", "os-release", "perl", "pki/ca-trust",
    "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "protocols", "python3*", "rpc", "services", "shells",
    "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "terminfo", "timezone", "xml",
)  # fmt: skip
_NEVER_COPIED = ("*.key", "private", "*shadow*")

_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost slot\n::1\tlocalhost ip6-localhost\n",
    "hostname": "slot\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
    "protocols: files\nservices: files\nrpc: files\n",
    "login.defs": "",
}

_DIRECTORIES = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555, "root": 0o700,
    "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "usr": 0o755, "var": 0o755,
    "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/spool": 0o755, "var/tmp": 0o1777,
}  # fmt: skip


def build(root: str, host: str, workspace: str, links: dict[str, str], trees: Iterable[str]) -> None:
    """Fill the empty directory `root`. `links` are top-level links as on the host, `trees` places to mount at."""
    for name, mode in _DIRECTORIES.items():
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", mode)
    os.symlink("/run", f"{root}/var/run")
    os.symlink("/run/lock", f"{root}/var/lock")
    os.makedirs(f"{root}/{workspace}")
    for name, target in links.items():
        os.symlink(target, f"{root}/{name}")
    for tree in trees:
        os.makedirs(f"{root}/{tree}", exist_ok=True)
    for name, text in _WRITTEN.items():
        _write(f"{root}/etc/{name}", text)
    os.symlink("/proc/self/mounts", f"{root}/etc/mtab")
    for pattern in _COPIED:
        folder, _, last = pattern.rpartition("/")
        source = f"{host}/etc/{folder}".rstrip("/")
        for name in fnmatch.filter(_names(source), last):
            os.makedirs(f"{root}/etc/{folder}", exist_ok=True)
            _copy(f"{source}/{name}", f"{root}/etc/{folder}/{name}")


def build_network(root: str, host: str) -> None:
    """Fill the directory `root` with what a slot with network has besides: the host's resolver."""
    os.mkdir(f"{root}/etc")
    top = os.open(host, os.O_PATH | os.O_DIRECTORY)
    try:
        for name in ("resolv.conf", "hosts"):
            with contextlib.suppress(OSError):  # a link to what is not there, or no resolver at all
                # Often a link, relative or absolute, that must be followed in the host's root and not in the server's.
                fd = syscalls.openat2(top, f"etc/{name}", os.O_RDONLY, syscalls.RESOLVE_IN_ROOT)
                with open(fd, encoding="utf-8", errors="replace") as file:
                    _write(f"{root}/etc/{name}", file.read())
    finally:
        os.close(top)


def give(root: str, owner: int) -> None:
    """Make `owner` the owner of everything under `root`."""
    for folder, _, files in os.walk(root):
        os.chown(folder, owner, owner)
        for name in files:
            os.chown(f"{folder}/{name}", owner, owner, follow_symlinks=False)
        for entry in os.scandir(folder):
            if entry.is_symlink():
                os.chown(entry.path, owner, owner, follow_symlinks=False)


def _copy(source: str, target: str) -> None:
    if any(fnmatch.fnmatch(os.path.basename(source), pattern) for pattern in _NEVER_COPIED):
        return
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target, 0o755)
        for name in _names(source):
            _copy(f"{source}/{name}", f"{target}/{name}")
    elif os.path.isfile(source) and os.stat(source).st_mode & 0o004:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
