"""Text files of a slot, over its bytes: the same for every kind of slot.

Reading replaces what is no UTF-8 and writing takes any text that a model may write: neither raises for its content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import overload

from palaestra.core.errors import InfraError
from palaestra.sandbox.base import MAX_FILE_BYTES


class TextFiles(ABC):
    """`read_text` and `write_text` of a slot that has `read_bytes` and `write_bytes`."""

    __slots__ = ()

    @abstractmethod
    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes: ...

    @abstractmethod
    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None: ...

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced; `missing`, if given, where there is no file to be read."""
        try:
            return (await self.read_bytes(path)).decode(errors="replace")
        except OSError as error:
            if missing is None or isinstance(error, InfraError):
                raise
            return missing

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None:
        """Write as UTF-8; surrogates, which have no place in it, are written as the bytes they stand for."""
        try:
            data = text.encode(errors="surrogateescape")
        except UnicodeEncodeError:  # lone surrogates, as models write them in JSON
            data = text.encode(errors="surrogatepass")
        await self.write_bytes(path, data, mode=mode)
