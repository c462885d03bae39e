"""Unpacks each image once for all runs on a machine, and stores it by its content.

    DIGEST/          the root file system          DIGEST.json   size, source and variables; its time is the last use
    DIGEST.lock      locked: shared while the image is in use, exclusive while it is made or removed
    known/KEY        the digest of an image file; KEY is a hash of the file's path, inode, size and times
    partial/         unfinished or removed images

A directory gets its name by a rename once it is complete. An image's leftovers in `partial/` are removed when the image
is next unpacked or removed. Only the owner can enter the folder, because the files in an image may belong to any user.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from palaestra_slots.core.errors import ImageError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.images import unpack
from palaestra_slots.sandbox.images.image_folders import default_folder, made_root
from palaestra_slots.sandbox.images.pulled import pulled_layout
from palaestra_slots.sandbox.images.reference import is_path
from palaestra_slots.sandbox.slot import read_variables

DEFAULT_IMAGE_BYTES = 32 << 30
DEFAULT_STORE_BYTES = 100 << 30

_log = logging.getLogger(__name__)


class ImageStore:
    """Provides the directories of images, unpacking images as needed, and keeps these directories in use until
    `aclose`. `pulled` and `made` are the folders of the images that tasks may name, by default this user's: those that
    were pulled (`pulled.py`), and the root file systems that `palaestra images make` has made."""

    def __init__(
        self,
        folder: str | None = None,
        *,
        max_image_bytes: int = DEFAULT_IMAGE_BYTES,
        max_bytes: int = DEFAULT_STORE_BYTES,
        pulled: Path | None = None,
        made: Path | None = None,
    ) -> None:
        self._folder = folder or default_folder()
        self._max_image_bytes, self._max_bytes = max_image_bytes, max_bytes
        self._held: dict[str, int] = {}  # the locks by digest
        self._variables: dict[str, dict[str, str]] = {}
        self._stop = threading.Event()
        self._threads: ThreadPoolExecutor | None = None
        self._pulled, self._made, self._named = pulled, made, dict[str, str]()
        self._asking: dict[str, asyncio.Lock] = {}

    async def directory(self, image: str) -> str:
        """Return the root file system of an image: the image itself if it is a root directory, otherwise the unpacked
        image. Raises `ImageError`."""
        if image and not is_path(image):  # a task names it, so it must not select a file in the working directory
            image = self._layout(image)
        path = os.path.realpath(image)
        if not image or path == "/":
            raise ImageError(
                f"the image {image!r} would be this machine itself with its secrets; set no image to use the machine's "
                "system directories, or give a root directory, a tar file or an OCI layout"
            )
        if os.path.isdir(path) and not unpack.is_layout(path):
            if not any(os.path.isdir(os.path.join(path, name)) for name in ("bin", "usr")):
                raise ImageError(f"the image {image!r} is not a root file system: {path} has neither bin nor usr")
            return path  # used in place, because its owner prepared it as an image
        if not os.path.exists(path):
            raise ImageError(f"the image {image!r} does not exist; give a root directory, a tar file or an OCI layout")
        # Requests for the same image wait here and not in a thread, of which there are two.
        async with self._asking.setdefault(path, asyncio.Lock()):
            self._threads = self._threads or ThreadPoolExecutor(2, thread_name_prefix="images")
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._unpacked, path)
            except OSError as error:
                raise ImageError(f"the image {image!r} cannot be unpacked to {self._folder}: {error}") from error

    def variables(self, directory: str) -> Mapping[str, str]:
        """Return the environment variables that the image in a directory of `directory` states; a root directory states
        none."""
        return self._variables.get(directory, {})

    def _layout(self, name: str) -> str:
        """Return the layout of an image that was pulled, or a root file system that was made: the same one as long as
        this store is open, also if its tag is pulled again. Raises `ImageError`."""
        found = self._named.get(name) or pulled_layout(name, self._pulled) or made_root(name, self._made)
        if found is None:
            raise ImageError(
                f"{name!r} is the name of an image that was not pulled: run `palaestra images pull {name}`, give a "
                f"root directory, a tar file or an OCI layout (./{name} for one in this folder), "
                "or use the backend docker"
            )
        self._named[name] = found
        return found

    async def aclose(self) -> None:
        """Release all images, and cancel unpacking. Idempotent."""
        self._stop.set()
        threads, self._threads = self._threads, None
        if threads is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)
            except RuntimeError:  # the interpreter is exiting: it has waited for these threads, and starts no others
                threads.shutdown()
        for lock in self._held.values():
            os.close(lock)
        self._held.clear()
        self._stop.clear()

    def _unpacked(self, path: str) -> str:
        """Return the directory of an image, unpacking the image first if necessary. Runs in a thread."""
        os.makedirs(f"{self._folder}/known", mode=0o700, exist_ok=True)
        os.makedirs(f"{self._folder}/partial", mode=0o700, exist_ok=True)
        os.chmod(self._folder, 0o700)
        digest = self._digest(path)
        directory = f"{self._folder}/{digest}"
        if digest not in self._held:
            self._held[digest] = self._lock_image(digest, path)
            self._variables[directory] = self._stated(digest, path)
            # The new image is locked by now, so it is not the one that is removed.
            self._evict()
        return directory

    def _stated(self, digest: str, path: str) -> dict[str, str]:
        """Return the image's variables from its record. Records of earlier versions lack them."""
        with contextlib.suppress(OSError, ValueError, KeyError), open(f"{self._folder}/{digest}.json") as file:
            return _image_variables(json.load(file)["env"])
        return _stated(path)

    def _digest(self, path: str) -> str:
        if os.path.isdir(path):
            return unpack.identity(path)
        status = os.stat(path)
        facts = (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        key = f"{self._folder}/known/{hashlib.sha256(repr(facts).encode()).hexdigest()}"
        with contextlib.suppress(FileNotFoundError), open(key, encoding="ascii") as file:
            return file.read()
        digest = unpack.identity(path)
        _write_atomically(key, digest)
        return digest

    def _lock_image(self, digest: str, path: str) -> int:
        """Lock an image's directory (shared); if it is missing, unpack the image under an exclusive lock. Returns the
        lock."""
        final = f"{self._folder}/{digest}"
        lock = os.open(f"{final}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not os.path.isdir(final):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.isdir(final):
                    self._unpack(digest, path, final)
                fcntl.flock(lock, fcntl.LOCK_SH)  # not atomic with the line above, hence the loop
            with contextlib.suppress(FileNotFoundError):
                os.utime(f"{final}.json")
            return lock
        except BaseException:
            os.close(lock)
            raise

    def _unpack(self, digest: str, path: str, final: str) -> None:
        partial = f"{self._folder}/partial/{digest}"
        shutil.rmtree(partial, ignore_errors=True)
        os.mkdir(partial, 0o755)
        try:
            size = unpack.unpack(unpack.layers(path), partial, path, self._max_image_bytes, self._stop)
            stated = [f"{name}={value}" for name, value in _stated(path).items()]
            record = {"schema": "palaestra.image", "version": 1, "bytes": size, "source": path, "env": stated}
            # Before the image has its name: an image without a record would never be evicted.
            _write_atomically(f"{final}.json", json.dumps(record))
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _evict(self) -> None:
        """Remove images that are not in use, least recently used first, until the remaining images take at most
        `max_bytes`."""
        records = sorted(self._records(), key=lambda record: record[1])
        total = sum(size for _, _, size in records)
        for digest, _, size in records:
            if total <= self._max_bytes:
                return
            if self._remove_image(digest):
                total -= size
        if total > self._max_bytes:
            _log.warning(
                "images in use take %d bytes in %s, which is more than the limit of %d bytes",
                total,
                self._folder,
                self._max_bytes,
            )

    def _records(self) -> Iterator[tuple[str, float, int]]:
        for name in os.listdir(self._folder):
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    path = f"{self._folder}/{name}"
                    with open(path, encoding="utf-8") as file:
                        yield name.removesuffix(".json"), os.stat(path).st_mtime, int(json.load(file)["bytes"])

    def _remove_image(self, digest: str) -> bool:
        final = f"{self._folder}/{digest}"
        lock = os.open(f"{final}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            partial = f"{self._folder}/partial/{digest}"
            shutil.rmtree(partial, ignore_errors=True)
            # Another process may have removed it before this one got the lock, or died between these steps.
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, partial)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{final}.json")
            shutil.rmtree(partial, ignore_errors=True)
            return True
        finally:
            os.close(lock)


def _write_atomically(path: str, text: str) -> None:
    """Write atomically, so that no reader sees an incomplete file."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _stated(path: str) -> dict[str, str]:
    """Return the variables that the image at a path states. An image need not have a configuration."""
    try:
        return _image_variables((unpack.stated_config(path) or {}).get("Env"))
    except (ImageError, AttributeError):
        return {}


def _image_variables(stated: JSON) -> dict[str, str]:
    """Return the variables in the words `NAME=VALUE` of an image's configuration; words of another form are left
    out. So are libraries that every program would load: the work can replace these files, and verdicts are made by
    programs in the slot."""
    words = [str(word) for word in (stated if isinstance(stated, list) else ()) if "=" in str(word)]
    return {name: value for name, value in read_variables(words).items() if name not in ("LD_PRELOAD", "LD_AUDIT")}
