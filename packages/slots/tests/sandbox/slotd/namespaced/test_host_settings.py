"""The files of the host's `/etc` that slots see."""

from __future__ import annotations

from pathlib import Path

from palaestra_slots.sandbox.slotd.namespaced.host import PUBLIC_SETTINGS, matching


def test_patterns_match_below_folders(tmp_path: Path) -> None:
    for name in ("php/8.2/cli/conf.d/20-dom.ini", "php/8.3/cli/conf.d/20-dom.ini", "php/8.2/cli/php.ini", "java-17/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert matching(str(tmp_path), "php/*/cli/conf.d") == ["php/8.2/cli/conf.d", "php/8.3/cli/conf.d"]
    assert matching(str(tmp_path), "java*") == ["java-17"]
    assert matching(str(tmp_path), "maven/m2.conf") == []


def test_settings_that_may_hold_passwords_are_not_public(tmp_path: Path) -> None:
    for name in ("php/8.2/cli/php.ini", "maven/settings.xml", "maven/toolchains.xml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path for pattern in PUBLIC_SETTINGS for path in matching(str(tmp_path), pattern)] == []
