"""Scripts import modules by the names that they had before they moved to packages of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOVED = {
    "palaestra.core.errors": "palaestra_slots.core.errors",
    "palaestra.doors.batch.prompts": "palaestra_chat.batch.prompts",
    "palaestra.doors.chat.config": "palaestra_chat.config",
    "palaestra.doors.gateway.config": "palaestra_gateway.config",
    "palaestra.inference.parsers": "palaestra_tokens.parsers",
    "palaestra.sandbox.slot": "palaestra_slots.sandbox.slot",
    "palaestra.suites.swe.swe_row": "palaestra_suites.swe.swe_row",
    "palaestra.trainers": "palaestra_train",
    "palaestra.contract": "palaestra_contract",
}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
@pytest.mark.parametrize("first", ["old", "new"])
def test_a_module_is_the_same_under_both_names(old: str, new: str, first: str) -> None:
    names = [old, new] if first == "old" else [new, old]
    code = (
        "import importlib, sys\n"
        f"one, two = map(importlib.import_module, {names})\n"
        f"assert one is two, (one, two)\n"
        f"assert one.__spec__.name == one.__name__ == {new!r}\n"
        f"assert sys.modules[{old!r}] is one\n"
        "importlib.invalidate_caches()\n"
        "assert hasattr(one, '__path__') == (one.__spec__.submodule_search_locations is not None)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize(
    "name", ["palaestra.suites.nothing", "palaestra.nothing", "palaestra.doors.nothing", "palaestra.agent.x"]
)
def test_other_names_are_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[2]):
        __import__(name)
