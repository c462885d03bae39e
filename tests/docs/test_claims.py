"""The table of claims in docs/reference/attacks.md: what the attacks have shown; every attack is behind a claim."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    """`scripts/claims.py`."""
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts/claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_attack_is_behind_one_claim(claims: ModuleType) -> None:
    behind = [name for claim in claims.SLOTS for name in claims.tests_of(claim)]
    assert sorted(behind) == sorted(claims.promises())


def test_the_page_shows_the_kept_results_of_the_present_attacks(claims: ModuleType) -> None:
    results = json.loads(claims.RESULTS.read_text(encoding="utf-8"))
    text = claims.PAGE.read_text(encoding="utf-8")
    assert claims.page(text, results) == text, "run scripts/claims.py"
    assert list(results) == [*claims.SLOTS, *claims.HOST], "run scripts/claims.py run"
    promised = claims.promises()
    for claim in claims.SLOTS:
        for level in claims.LEVELS:
            tests = claims.tests_of(claim)
            held, ran = results[claim][level]
            assert held <= ran <= len(tests)
            assert held == ran or any(level not in promised[name] for name in tests), f"{claim} failed on {level}"
            assert ran == len(tests), f"{claim} has other tests than its results: run scripts/claims.py run"


def test_files_behind_claims_about_the_host_exist(claims: ModuleType) -> None:
    for places in claims.HOST.values():
        for place in places:
            path, _, name = place.partition("::")
            assert (ROOT / path).exists()
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_tests_of_what_ends_in_a_score_exist() -> None:
    table = (ROOT / "packages/palaestra/tests/rollouts/grading/README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:extensions/|packages/)?[\w/]*tests/[\w/.]+)`", table)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []
