"""All families, by name, and the areas they belong to."""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.suites.endless_terminals.families import (
    archives,
    data_formats,
    databases,
    file_tasks,
    git_tasks,
    logs,
    processes,
    scripts,
    tables,
    text,
)
from palaestra.suites.endless_terminals.family import Family

AREAS: Mapping[str, tuple[Family, ...]] = {
    "files": file_tasks.FAMILIES,
    "text": text.FAMILIES,
    "logs": logs.FAMILIES,
    "tables": tables.FAMILIES,
    "formats": data_formats.FAMILIES,
    "archives": archives.FAMILIES,
    "processes": processes.FAMILIES,
    "git": git_tasks.FAMILIES,
    "databases": databases.FAMILIES,
    "scripts": scripts.FAMILIES,
}

FAMILIES: Mapping[str, Family] = {family.name: family for area in AREAS.values() for family in area}
