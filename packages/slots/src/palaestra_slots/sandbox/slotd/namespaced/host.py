"""Prepares the server's own root, and the parts that all of its slots share: lower directories, the base system, and
the source of user namespaces.

The server makes a tmpfs its root and keeps the host's root below it as /host. It does so in a mount namespace of its
own and over an existing directory, so nothing is created on the host.

The base system is the lowest tree of slots without an image: top-level directories and a generated `/etc`. Only listed
files that any user may read are copied from the host's `/etc`: for linking, fonts, time zones and certificates. The
base system has no accounts, keys, host name or resolver of the host.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import syscalls
from ..layers.layer_store import Tree
from ..layers.overlay import OverlayMarks
from ..network import tunnel_device
from ..protocol.frames import Fields
from ..rung import HOST
from . import namespaces, native_init
from .rootfs import Bind, Lowers, host_trees, make_shared_directories, system_directories, system_links

_OPTIONS = "mode=755,size=64m"
_SKELETON, _NETWORK = "/skeleton/base", "/skeleton/network"
# The lowest tree of every image: directories that must exist, whether the image has them or not.
_PLACES = "/skeleton/places"
# Files that are laid over an image that lacks them: `docker export` leaves files empty if docker mounts over them.
_HOSTS, _RESOLVER = "/skeleton/hosts", "/skeleton/resolver"
PUBLIC_SETTINGS = (
    "alternatives", "ca-certificates.conf", "crypto-policies", "debian_version", "fonts", "gai.conf", "host.conf",
    "java*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld-musl-*.path", "locale.alias", "locale.conf", "localtime",
    "lsb-release", "magic", "magic.mime", "maven/logging", "maven/m2.conf", "maven/settings-debian.xml", "mime.types",
    "netconfig", "networks", "os-release", "perl", "php/*/cli/conf.d", "php/*/mods-available", "pki/ca-trust",
    "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "protocols", "python3*", "rpc", "services", "shells",
    "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "terminfo", "timezone", "xml",
)  # fmt: skip
_NEVER_COPIED = ("*.key", "private", "*shadow*")

COPY = "copy-"
"""How the names of trees of host directories begin."""

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


@dataclass
class HostSetup:
    """The shared parts of a server's slots. `owner` is the slots' root user as the server sees it."""

    full: bool
    owner: int
    user_namespaces: namespaces.RangeNamespaces | None  # None if each slot makes its own
    networks: namespaces.UnusedNetworks | None  # None if each slot makes its own
    user_xattrs: bool
    lowers: Lowers
    init: int  # a descriptor of the program that is pid 1 of each slot
    tunnel: bool  # whether slots with the network on have a device of their own
    prefix: Bind | None = None
    own_devices: bool = False  # whether slots have files of their own for devices
    packages_shown: bool = False  # whether slots without an image see packages (`packages.py`)

    @property
    def marks(self) -> OverlayMarks:
        """The overlay marks of this server's layers."""
        return OverlayMarks(self.user_xattrs)

    def trees(self, image: str | None, network: bool) -> tuple[Tree, ...]:
        """Return the trees of a root. Raises OSError if the image cannot be used."""
        if image is not None:
            lower = self.lowers.get(image)
            added = (_HOSTS,) if _lacks(image, "etc/hosts", b"localhost") else ()
            if network and os.path.exists(f"{_RESOLVER}/etc/resolv.conf") and self._lacks_resolver(image):
                added = (*added, _RESOLVER)
            return (Tree("root", "/", (*added, lower, _PLACES)),)
        skeleton = (_NETWORK, _SKELETON) if network else (_SKELETON,)
        return host_trees(self.lowers, skeleton, packages_shown=self.packages_shown)

    def _lacks_resolver(self, image: str) -> bool:
        """Return whether an image names no resolver that its slots can reach. In a slot with its own network device, no
        resolver listens on the loopback."""
        if _lacks(image, "etc/resolv.conf", b"nameserver"):
            return True
        lines = _start_of(f"{HOST}{image}/etc/resolv.conf").decode(errors="replace").splitlines()
        named = [line.split()[1:2] for line in lines if line.startswith("nameserver")]
        return self.tunnel and all(address[:1] in ([], ["::1"]) or address[0].startswith("127.") for address in named)

    def binds(self, mounts: list[list[Any]], image: str | None) -> tuple[Bind, ...]:
        """Return the read-only mounts of a root."""
        wanted = tuple(self.lowers.bind(source, target, *whole) for source, target, *whole in mounts)
        return wanted if image is not None or self.prefix is None else (self.prefix, *wanted)

    def copies(self, mounts: Sequence[list[Any]]) -> tuple[Tree, ...]:
        """Return the trees of host directories that a slot has as its own. Their names are the same in every slot,
        because layers have changes by the name of the tree."""
        names = (f"{COPY}{hashlib.sha256(os.fsencode(target)).hexdigest()[:16]}" for _, target, *_ in mounts)
        lowers = ((target, (self.lowers.get(source),)) for source, target, *_ in mounts)
        return tuple(Tree(name, *place) for name, place in zip(names, lowers, strict=True))


def _lacks(image: str, name: str, word: bytes) -> bool:
    """Return whether a file of an image is missing, is a link, or does not contain this word."""
    path = f"{HOST}{image}/{name}"
    try:
        # An absolute link of the image would lead to a file of the host here, and to another one in the slot.
        return os.path.islink(path) or word not in _start_of(path)
    except OSError:
        return True


def _start_of(path: str) -> bytes:
    # An image can have a fifo there, and opening that would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def enter_own_root() -> None:
    """Move this process to a mount namespace and a root of its own."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # Nothing that is mounted here reaches the host, but what the host mounts later still appears below /host.
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    place = next(path for path in ("/tmp", "/mnt", "/var", "/usr") if os.path.isdir(path))  # noqa: S108
    syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _OPTIONS)
    os.mkdir(f"{place}{HOST}")
    try:
        syscalls.pivot_root(place, f"{place}{HOST}")
    except PermissionError:
        _move_root(place)
    os.chdir("/")
    os.mkdir("/proc")
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    for name in ("slots", "lower", "skeleton", "stage"):
        os.mkdir(f"/{name}")


def _move_root(place: str) -> None:
    """Move to a new root in a container that forbids pivot_root. The new root is mounted over the old one, and a copy
    of the old mounts is attached below the new root."""
    syscalls.umount(place)
    tree = syscalls.open_tree("/", recursive=True)  # before anything is mounted in it
    try:
        syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _OPTIONS)
        os.mkdir(f"{place}{HOST}")
        syscalls.move_mount(tree, f"{place}{HOST}")
    finally:
        os.close(tree)
    os.chdir(place)
    syscalls.mount(".", "/", flags=syscalls.MS_MOVE)
    os.chroot(".")


def prepare(full: bool, settings: Fields) -> HostSetup:
    """Make the parts that all slots share. Raises OSError if this kernel or its configuration does not allow it."""
    init = native_init.load(HOST)
    privileged = namespaces.is_real_root()
    users = namespaces.RangeNamespaces() if privileged else None
    networks = namespaces.UnusedNetworks() if privileged else None
    owner = namespaces.RANGE_START if privileged else 0
    lowers = Lowers(namespaces.make_range_namespace() if full else None, OverlayMarks(not privileged), owner)
    own_network = tunnel_device.usable(HOST)
    world = HostSetup(full, owner, users, networks, not privileged, lowers, init, own_network)
    world.packages_shown = not settings.get("machine")
    syscalls.mount("tmpfs", "/skeleton", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=64m")
    prefix = settings.get("prefix")
    if prefix:
        world.prefix = lowers.bind(prefix, prefix)
    places = [f"/{name}" for name in system_directories()] + ([prefix] if prefix else [])
    os.mkdir(_SKELETON)
    os.mkdir(_NETWORK)
    for name in ("dev", "proc", "root", "sys", "tmp", "workspace"):
        os.makedirs(f"{_PLACES}/{name}")
    _build_base(_SKELETON, system_links(), places)
    _build_network(_NETWORK, ("resolv.conf", "hosts"), own_network)
    os.mkdir(_HOSTS)
    os.mkdir(f"{_HOSTS}/etc")
    namespaces.write_file(f"{_HOSTS}/etc/hosts", _WRITTEN["hosts"])
    os.mkdir(_RESOLVER)
    _build_network(_RESOLVER, ("resolv.conf",), own_network)
    if owner:
        _give("/skeleton", owner)
    # after `_give`, so that the host's devices keep their owner
    world.own_devices = make_shared_directories(privileged)
    return world


def _build_base(root: str, links: dict[str, str], trees: Iterable[str]) -> None:
    """Fill an empty directory with the root of slots without an image. `links` are the host's top-level links, `trees`
    are mount points."""
    for name, mode in _DIRECTORIES.items():
        os.mkdir(f"{root}/{name}")
        # The umask takes bits from the mode of mkdir.
        os.chmod(f"{root}/{name}", mode)
    os.symlink("/run", f"{root}/var/run")
    os.symlink("/run/lock", f"{root}/var/lock")
    os.makedirs(f"{root}/workspace")
    for name, target in links.items():
        os.symlink(target, f"{root}/{name}")
    for tree in trees:
        os.makedirs(f"{root}/{tree}", exist_ok=True)
    for name, text in _WRITTEN.items():
        namespaces.write_file(f"{root}/etc/{name}", text)
    # Where df and mount look for the mounts. Source: mount(8).
    os.symlink("/proc/self/mounts", f"{root}/etc/mtab")
    for pattern in PUBLIC_SETTINGS:
        for path in matching(f"{HOST}/etc", pattern):
            os.makedirs(os.path.dirname(f"{root}/etc/{path}"), exist_ok=True)
            _copy_host_file(f"{HOST}/etc/{path}", f"{root}/etc/{path}")


def _build_network(root: str, names: Iterable[str], own_network: bool) -> None:
    """Copy these files from the host's `/etc` into a directory, for slots with the network on. For slots with a network
    of their own, the gateway becomes the resolver and gets a host name."""
    os.mkdir(f"{root}/etc")
    top = os.open(HOST, os.O_PATH | os.O_DIRECTORY)
    try:
        for name in names:
            with contextlib.suppress(OSError):  # a dangling link, or no resolver
                # The file is often a link, which must be followed in the host's root and not in the server's.
                fd = syscalls.openat2(top, f"etc/{name}", os.O_RDONLY, syscalls.RESOLVE_IN_ROOT)
                with open(fd, encoding="utf-8", errors="replace") as file:
                    text = file.read()
                namespaces.write_file(f"{root}/etc/{name}", _through_gateway(name, text) if own_network else text)
    finally:
        os.close(top)


def _through_gateway(name: str, text: str) -> str:
    """Return the host's `hosts` or `resolv.conf` for slots that reach the host only at the gateway's address."""
    gateway = tunnel_device.GATEWAY[4]
    if name == "hosts":
        return f"{text.rstrip()}\n{gateway}\t{tunnel_device.HOST_NAME}\n"
    lines = [line for line in text.splitlines() if not line.startswith("nameserver")]
    return "\n".join([f"nameserver {gateway}", *lines, ""])


def _give(root: str, owner: int) -> None:
    """Change the owner of everything under a directory."""
    for folder, _, files in os.walk(root):
        os.chown(folder, owner, owner)
        for name in files:
            os.chown(f"{folder}/{name}", owner, owner, follow_symlinks=False)
        # `os.walk` counts links to directories among the directories, and does not enter them.
        for entry in os.scandir(folder):
            if entry.is_symlink():
                os.chown(entry.path, owner, owner, follow_symlinks=False)


def _copy_host_file(source: str, target: str) -> None:
    if is_private(source):
        return
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target, 0o755)
        for name in _list_directory(source):
            _copy_host_file(f"{source}/{name}", f"{target}/{name}")
    # A file that not everybody on the host may read must not become readable in a slot.
    elif os.path.isfile(source) and os.stat(source).st_mode & 0o004:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def is_private(path: str) -> bool:
    """Return whether a file's name is typical of files with keys or passwords."""
    return any(fnmatch.fnmatch(os.path.basename(path), pattern) for pattern in _NEVER_COPIED)


def matching(directory: str, pattern: str) -> list[str]:
    """Return the paths below a directory that match a pattern, relative to the directory."""
    first, _, rest = pattern.partition("/")
    names = fnmatch.filter(_list_directory(directory), first)
    return [f"{name}/{path}" for name in names for path in matching(f"{directory}/{name}", rest)] if rest else names


def _list_directory(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
