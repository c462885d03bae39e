"""Check the file system: text, existence, modes, links, and the content of a directory."""

from __future__ import annotations

import hashlib
import posixpath

from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.endless_terminals.checks.base_check import (
    BaseCheck,
    different,
    plain,
    read_slot_bytes,
    read_slot_text,
    run_probe,
    stat_or_none,
)


class FileContent(BaseCheck, frozen=True, tag="text"):
    """A file with this text. Unless `exact` is true, blanks at line ends and empty lines at the end of the file are
    ignored."""

    text: str
    exact: bool = False

    async def fault(self, slot: Slot) -> str:
        got = await read_slot_text(slot, self.path)
        if self.exact:
            return different(self.path, got, self.text)
        return different(self.path, plain(got), plain(self.text))


class Lines(BaseCheck, frozen=True):
    """A file with these lines. Blanks around lines, and empty lines, are ignored."""

    lines: list[str]

    async def fault(self, slot: Slot) -> str:
        got = [line.strip() for line in (await read_slot_text(slot, self.path)).splitlines() if line.strip()]
        wanted = [line.strip() for line in self.lines]
        return different(self.path, got, wanted)


class Exists(BaseCheck, frozen=True):
    """An entry of this kind exists: file, dir or symlink."""

    kind: str = "file"

    async def fault(self, slot: Slot) -> str:
        found = await stat_or_none(slot, self.path)
        if found is None:
            return f"{self.path} does not exist"
        return "" if found.kind == self.kind else f"{self.path} is a {found.kind}, not a {self.kind}"


class Absent(BaseCheck, frozen=True):
    """No entry exists at `path`."""

    async def fault(self, slot: Slot) -> str:
        return f"{self.path} exists" if await stat_or_none(slot, self.path) else ""

    def made(self) -> tuple[str, ...]:
        return ()


class Modes(BaseCheck, frozen=True):
    """Files and directories below `path` with these permission bits in octal: "640"."""

    modes: dict[str, str]

    async def fault(self, slot: Slot) -> str:
        for name, wanted in self.modes.items():
            found = await stat_or_none(slot, posixpath.join(self.path, name))
            if found is None:
                return f"{self.path}/{name} does not exist"
            if found.mode & 0o7777 != int(wanted, 8):
                return f"{self.path}/{name} has mode {found.mode & 0o7777:o}"
        return ""

    def made(self) -> tuple[str, ...]:
        return ()


class SymbolicLink(BaseCheck, frozen=True, tag="link"):
    """A symbolic link to `target`, as a relative or an absolute path."""

    target: str

    async def fault(self, slot: Slot) -> str:
        code = "answer([os.readlink(asked[0]), os.path.realpath(asked[0]) == os.path.realpath(asked[1])])"
        found = await stat_or_none(slot, self.path)
        if found is None or found.kind != "symlink":
            return f"{self.path} is not a symbolic link"
        link, same = await run_probe(slot, code, [self.path, self.target], tuple[str, bool])
        return "" if same else f"{self.path} points to {link}"


class Files(BaseCheck, frozen=True):
    """A directory that contains exactly these files, at any depth, with these texts (None: any text)."""

    files: dict[str, str | None]

    async def fault(self, slot: Slot) -> str:
        code = (
            "answer(sorted(os.path.relpath(os.path.join(at, name), asked) "
            "for at, _, names in os.walk(asked) for name in names)[:2000])"
        )
        got = await run_probe(slot, code, self.path, list[str])
        if sorted(got) != sorted(self.files):
            extra, missing = sorted(set(got) - set(self.files)), sorted(set(self.files) - set(got))
            return f"{self.path}: {len(missing)} files are missing, {len(extra)} are unexpected {extra[:3]}"
        for name, wanted in self.files.items():
            if wanted is not None:
                text = await read_slot_text(slot, f"{self.path}/{name}")
                if plain(text) != plain(wanted):
                    return f"{self.path}/{name} has other content"
        return ""

    def made(self) -> tuple[str, ...]:
        return tuple(f"{self.path}/{name}" for name in self.files)


class Digests(BaseCheck, frozen=True):
    """A file with a line of `sha256sum` for each of these files, in any order, with paths relative to the workspace."""

    files: list[str]
    algorithm: str = "sha256"

    async def fault(self, slot: Slot) -> str:
        wanted = [
            [hashlib.new(self.algorithm, await read_slot_bytes(slot, path)).hexdigest(), path] for path in self.files
        ]
        lines = [line.split(None, 1) for line in plain(await read_slot_text(slot, self.path)) if line]
        got = [[line[0].lower(), line[1].strip().removeprefix("*").removeprefix("./")] for line in lines if line[1:]]
        return different(self.path, sorted(got), sorted(wanted))


__all__ = ["Absent", "Digests", "Exists", "FileContent", "Files", "Lines", "Modes", "SymbolicLink"]
