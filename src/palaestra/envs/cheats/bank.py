"""All cheats. Sources: public reports on agents and audits of benchmarks; each is the idea, for any workspace."""

from __future__ import annotations

from palaestra.envs.cheats.cheat import Cheat
from palaestra.envs.cheats.forged_verdicts import VERDICTS
from palaestra.envs.cheats.leaks import LEAKS
from palaestra.envs.cheats.package_under_test import SOURCES
from palaestra.envs.cheats.planted_files import PLANTS
from palaestra.envs.cheats.shadowed_names import SHADOWS

BANK: tuple[Cheat, ...] = (*PLANTS, *SHADOWS, *VERDICTS, *SOURCES, *LEAKS)
