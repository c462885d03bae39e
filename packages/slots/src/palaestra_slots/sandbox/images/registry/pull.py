"""Pulls an image: its manifest, then each blob that is not stored yet, verified while it arrives.

A blob is written to `partial/`, and after a cut the download continues there, also in a later process. Once its size
and digest are right, it gets its name in the store; otherwise it is removed. An image gets its name only when all its
blobs are stored. Processes that pull the same blob wait for each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ImageError, PullError
from palaestra_slots.core.io.durable_files import read_regular
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.retry import RetryPolicy, TransientFailure, persist
from palaestra_slots.sandbox.images import unpack
from palaestra_slots.sandbox.images.image_store import DEFAULT_IMAGE_BYTES
from palaestra_slots.sandbox.images.pulled import PulledImage, PulledImages
from palaestra_slots.sandbox.images.reference import image_name
from palaestra_slots.sandbox.images.registry import manifests
from palaestra_slots.sandbox.images.registry.manifests import Blob, ImageManifest
from palaestra_slots.sandbox.images.registry.repository import ImageRepository, RegistryAccess, new_session

RETRY = RetryPolicy(attempts=5, first_s=0.5, longest_s=20.0)
"""The tries in a row for a manifest or for a blob. A blob's tries count from the start again after 16 MiB."""

_FORGIVEN_BYTES = 16 << 20
_CONCURRENT = 3
_MANIFEST_S = 300.0
_SLOWEST_BYTES_S = 16 << 10
"""The mean speed, in bytes per second, below which a download counts as cut after `_MANIFEST_S` seconds."""
_PIECE_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Is called with the bytes of an image that are stored, and the bytes of the whole image."""


@dataclass(slots=True)
class Pull:
    """The settings of pulls into one store. `max_bytes` limits the compressed size of one image."""

    images: PulledImages
    access: RegistryAccess
    max_bytes: int = DEFAULT_IMAGE_BYTES
    retry: RetryPolicy = RETRY
    clock: Clock | None = None

    async def image(self, text: str, progress: Progress = lambda done, total: None) -> PulledImage:
        """Pull the image with this name, and return it. An image that is named by its digest and already stored is not
        requested again.

        Raises `PullError` if the registry fails, and `ImageError` for an image that cannot be used.
        """
        name = image_name(text)
        self.images.open()
        found = self.images.find(name) if name.digest else None
        if found is not None:
            return found
        with self.images.in_use():
            async with new_session() as session:
                repository = ImageRepository(session, name, self.access)
                try:
                    data, manifest = await self._manifest(repository, name.reference, str(name))
                    # The configuration first: it is small, and states for which machine the layers are.
                    await self._blobs(repository, (manifest.config,), lambda done, total: None)
                    config = read_regular(self.images.blob(manifest.config.value), manifests.MAX_CONFIG_BYTES)
                    manifests.check_platform(config, unpack.architecture(), str(name))
                    await self._blobs(repository, manifest.blobs, progress)
                    value = self.images.store(data)
                    kind = manifest.blob.media_type
                    return self.images.add(name, value, kind, len(data), manifest.bytes)
                except OSError as error:
                    raise ImageError(f"{name} cannot be stored in {self.images.folder}: {error.strerror}") from error

    async def _manifest(self, repository: ImageRepository, reference: str, name: str) -> tuple[bytes, ImageManifest]:
        """Return the manifest for this machine, following an index."""
        data, found = await self._read_manifest(repository, reference, name)
        digest, size = manifests.digest_of(data), len(data)
        if found["mediaType"] in manifests.INDEXES:
            entry = manifests.manifest_for(found, unpack.architecture(), name)
            data, found = await self._read_manifest(repository, entry.digest, name)
            digest, size = entry.digest, len(data)
            if found["mediaType"] in manifests.INDEXES or size != entry.size:
                raise ImageError(f"{name} is not valid: an entry of its index is not the manifest that it states")
        blob = Blob(digest, size, str(found["mediaType"]))
        return data, manifests.image_manifest(found, blob, name, self.max_bytes)

    async def _read_manifest(
        self, repository: ImageRepository, reference: str, name: str
    ) -> tuple[bytes, dict[str, Any]]:
        async def ask(tries: int, left_s: float) -> tuple[bytes, str]:
            try:
                async with asyncio.timeout(left_s):
                    return await repository.manifest(reference, name)
            except TimeoutError:
                raise PullError(f"{name}: the registry did not send its manifest in {_MANIFEST_S:.0f} s") from None

        data, kind = await persist(
            ask,
            retry=self.retry,
            timeout_s=_MANIFEST_S,
            clock=self.clock or SystemClock(),
            rng=random.Random(),
        )
        return data, manifests.read(data, kind, name)

    async def _blobs(self, repository: ImageRepository, blobs: Sequence[Blob], progress: Progress) -> None:
        """Download the blobs that are missing, a few concurrently."""
        missing = [blob for blob in blobs if not self.images.blob(blob.value).exists()]
        self._check_disk(missing)
        done = {blob.digest: blob.size for blob in blobs if blob not in missing}
        total = sum(blob.size for blob in blobs)
        places = asyncio.Semaphore(_CONCURRENT)

        async def pull_blob(blob: Blob) -> None:
            def arrived(count: int) -> None:
                done[blob.digest] = count
                progress(sum(done.values()), total)

            async with places, file_lock(self.images.lock(blob.value)):
                if not self.images.blob(blob.value).exists():
                    await _Download(self, repository, blob, arrived).run()
                arrived(blob.size)

        progress(sum(done.values()), total)
        try:
            async with asyncio.TaskGroup() as group:
                for blob in missing:
                    group.create_task(pull_blob(blob))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _check_disk(self, missing: list[Blob]) -> None:
        left = sum(blob.size for blob in missing)
        for blob in missing:
            if (partial := self.images.partial(blob.value)).exists():
                left -= min(blob.size, partial.stat().st_size)
        free = shutil.disk_usage(self.images.folder).free
        if left > free:
            raise ImageError(
                f"the image needs {left} bytes in {self.images.folder}, and {free} bytes are free there; `palaestra "
                "images remove NAME` frees space"
            )


class _Download:
    """The download of one blob, whose lock is held."""

    def __init__(self, pull: Pull, repository: ImageRepository, blob: Blob, arrived: Callable[[int], None]) -> None:
        self._pull, self._repository, self._blob, self._arrived = pull, repository, blob, arrived
        self._path = pull.images.partial(blob.value)
        self._have = 0
        self._digest = hashlib.sha256()

    async def run(self) -> None:
        """Download what is missing, verify the whole, and move it into the store. Raises `PullError`, after removing
        what does not match the digest, or `OSError`."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b") as file:
            resumed = await asyncio.to_thread(self._resume, file)
            await self._download(file)
            if resumed and not self._is_right():  # a damaged part: the registry is not to blame yet
                self._restart(file)
                await self._download(file)
            if not self._is_right():
                self._path.unlink()
                raise PullError(
                    f"the registry sent {self._have} bytes for {self._blob.digest} that do not match this digest and "
                    f"its size of {self._blob.size} bytes: they were removed"
                )
            # A blob under its own name counts as verified, so its content must be on the disk before it gets that name.
            await asyncio.to_thread(os.fsync, file.fileno())
        self._path.rename(self._pull.images.blob(self._blob.value))

    def _is_right(self) -> bool:
        return self._have == self._blob.size and self._digest.hexdigest() == self._blob.value

    def _resume(self, file: IO[bytes]) -> bool:
        """Read what an earlier download left. Returns whether there is any."""
        if os.fstat(file.fileno()).st_size > self._blob.size:
            file.truncate(0)
        while piece := file.read(_PIECE_BYTES):
            self._digest.update(piece)
            self._have += len(piece)
        return self._have > 0

    def _restart(self, file: IO[bytes]) -> None:
        file.seek(0)
        file.truncate(0)
        self._have, self._digest = 0, hashlib.sha256()

    async def _download(self, file: IO[bytes]) -> None:
        """Write the rest of the blob. After a cut, ask for what is missing."""
        failures, seen = 0, self._have
        clock = self._pull.clock or SystemClock()
        while self._have < self._blob.size:
            try:
                await self._receive_in_time(file)
            except TransientFailure as failed:
                if self._have - seen >= _FORGIVEN_BYTES:
                    failures, seen = 0, self._have
                failures += 1
                if failures >= self._pull.retry.attempts:
                    raise PullError(
                        f"{failed.problem}; {self._have} of {self._blob.size} bytes of {self._blob.digest} are stored "
                        "after several tries: pull the image again to continue from there"
                    ) from failed
                rng = random.Random()
                await clock.sleep(self._pull.retry.wait_s(failures, failed.asked_s, rng))

    async def _receive_in_time(self, file: IO[bytes]) -> None:
        limit_s = _MANIFEST_S + (self._blob.size - self._have) / _SLOWEST_BYTES_S
        try:
            async with asyncio.timeout(limit_s):
                await self._receive_blob(file)
        except TimeoutError:
            raise TransientFailure(PullError(f"{self._blob.digest} arrives too slowly")) from None

    async def _receive_blob(self, file: IO[bytes]) -> None:
        async with self._repository.blob(self._blob.digest, self._have) as (content, start):
            if start != self._have:
                self._restart(file)
            async for piece in content.iter_chunked(_PIECE_BYTES):
                if self._have + len(piece) > self._blob.size:
                    self._path.unlink()
                    raise PullError(
                        f"the registry sent more than the {self._blob.size} bytes of {self._blob.digest}: "
                        "they were removed"
                    )
                await asyncio.to_thread(self._write_piece, file, piece)
                self._arrived(self._have)
        if self._have < self._blob.size:
            raise TransientFailure(PullError(f"the registry ended the download of {self._blob.digest} early"))

    def _write_piece(self, file: IO[bytes], piece: bytes) -> None:
        file.write(piece)
        file.flush()  # so that a killed process leaves all that it received
        self._digest.update(piece)
        self._have += len(piece)
