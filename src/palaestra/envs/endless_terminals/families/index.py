"""All families, by name, and the areas they belong to."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.envs.endless_terminals.base import Family
from palaestra.envs.endless_terminals.families import (
    archives,
    databases,
    files,
    formats,
    git,
    logs,
    processes,
    scripts,
    tables,
    text,
)

AREAS: Mapping[str, tuple[Family, ...]] = {
    "files": files.FAMILIES,
    "text": text.FAMILIES,
    "logs": logs.FAMILIES,
    "tables": tables.FAMILIES,
    "formats": formats.FAMILIES,
    "archives": archives.FAMILIES,
    "processes": processes.FAMILIES,
    "git": git.FAMILIES,
    "databases": databases.FAMILIES,
    "scripts": scripts.FAMILIES,
}

FAMILIES: Mapping[str, Family] = {family.name: family for area in AREAS.values() for family in area}
