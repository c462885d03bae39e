"""All cheats. Sources: public reports on agents and audits of benchmarks; each is the idea, for any workspace."""

from __future__ import annotations

from palaestra.envs.cheats.base import Cheat
from palaestra.envs.cheats.leaks import LEAKS
from palaestra.envs.cheats.plants import PLANTS
from palaestra.envs.cheats.shadows import SHADOWS
from palaestra.envs.cheats.sources import SOURCES
from palaestra.envs.cheats.verdicts import VERDICTS

BANK: tuple[Cheat, ...] = (*PLANTS, *SHADOWS, *VERDICTS, *SOURCES, *LEAKS)
