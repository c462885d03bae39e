"""Check files by their parsed content, ignoring layout, quoting and the order of keys."""

from __future__ import annotations

import asyncio
import configparser
import csv
import io
import json
import re

from palaestra_slots.core.config import read_toml, read_yaml
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.endless_terminals.checks.base_check import BaseCheck, different, read_slot_text, something_else

_MOST_SLOW_BYTES = 1 << 16
"""The maximum size, in bytes, of a file whose format Python parses slowly."""

_MOST_INI_BYTES = 1 << 14
"""The maximum size, in bytes, of an INI file. The time to report its invalid lines grows with the square of their
number, and each section gets all entries of `DEFAULT`."""


def _same(got: JSON, wanted: JSON) -> bool:
    """Return whether values are equal as data: 1 equals 1.0, but true differs from 1."""
    if isinstance(got, bool) or isinstance(wanted, bool):
        return got is wanted
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    return bool(got == wanted)


def _difference(path: str, got: JSON, wanted: JSON) -> str:
    return "" if _same(got, wanted) else something_else(path, got)


class Json(BaseCheck, frozen=True, tag="json"):
    """A JSON file with this value."""

    value: JSON

    async def fault(self, slot: Slot) -> str:
        try:
            got = json.loads(await read_slot_text(slot, self.path))
        except (ValueError, RecursionError):
            return f"{self.path} is not JSON"
        return _difference(self.path, got, self.value)


class JsonLines(BaseCheck, frozen=True):
    """A file of JSON lines with these values."""

    values: list[JSON]

    async def fault(self, slot: Slot) -> str:
        lines = [line for line in (await read_slot_text(slot, self.path)).splitlines() if line.strip()]
        try:
            got = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return f"{self.path} is not JSON lines"
        return _difference(self.path, got, self.values)


class Csv(BaseCheck, frozen=True):
    """Separated values with these cells; `rows[0]` is the header."""

    rows: list[list[str]]
    separator: str = ","

    async def fault(self, slot: Slot) -> str:
        text = io.StringIO(await read_slot_text(slot, self.path), newline="")
        try:
            got = [[cell.strip() for cell in row] for row in csv.reader(text, delimiter=self.separator) if row]
        except csv.Error:
            return f"{self.path} does not have the requested format"
        return different(self.path, got, self.rows)


class _IniParser(configparser.ConfigParser):
    """A parser that splits a line in linear time. With the pattern of `configparser`, the time grows with the square of
    the number of blanks."""

    OPTCRE = re.compile(r"(?P<option>[^=:]*)(?P<vi>[=:])(?P<value>.*)")


class Ini(BaseCheck, frozen=True):
    """An INI file with these sections and values. The case of keys is ignored, as in most programs that read INI
    files."""

    sections: dict[str, dict[str, str]]

    async def fault(self, slot: Slot) -> str:
        parser = _IniParser(interpolation=None)
        text = await read_slot_text(slot, self.path, _MOST_INI_BYTES)
        try:
            parser.read_string(text)
        except configparser.Error:
            return f"{self.path} is not an INI file"
        got = {name: dict(parser.items(name)) for name in parser.sections()}
        return different(self.path, got, self.sections)


class Toml(BaseCheck, frozen=True):
    """A TOML file with this value."""

    value: JSON

    async def fault(self, slot: Slot) -> str:
        text = await read_slot_text(slot, self.path, _MOST_SLOW_BYTES)
        try:
            got = await asyncio.to_thread(read_toml, text)  # hostile text can take a second
        except (ValueError, RecursionError):
            return f"{self.path} is not TOML"
        return _difference(self.path, got, self.value)


class Yaml(BaseCheck, frozen=True):
    """A YAML file with this value."""

    value: JSON

    async def fault(self, slot: Slot) -> str:
        text = await read_slot_text(slot, self.path, _MOST_SLOW_BYTES)
        try:
            got = await asyncio.to_thread(read_yaml, text)
        except ValueError:
            return f"{self.path} is not YAML"
        return _difference(self.path, got, self.value)
