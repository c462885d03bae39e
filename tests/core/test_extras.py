"""The advice to install an extra works as this package is installed."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra_slots.core.extras import extra_version, install_command

ROOT = Path(__file__).parents[2]


def test_a_checkout_is_named_by_its_path() -> None:
    check_message(install_command("web"), ROOT, "/packages/palaestra")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'palaestra[web]'"),
        ({"url": "file:///tmp/p.whl", "archive_info": {}}, "pip install 'palaestra[web] @ file:///tmp/p.whl'"),
        ({"url": "file:///srv/a%20b", "dir_info": {"editable": True}}, "pip install -e '/srv/a b[web]'"),
    ],
)
def test_another_installation_is_named_by_its_origin(
    origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "palaestra-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: palaestra\nVersion: 9\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("palaestra") == "9"
    assert install_command("web") == command


def test_no_message_and_no_page_takes_the_package_from_an_index() -> None:
    """A package index may lack this package, or have one of another owner under its name."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = [ROOT / name for name in listed.split("\0") if re.search(r"\.(py|md|yaml|sbatch|txt)$", name)]
    taken = re.compile(r"pip install ['\"]?palaestra\[")
    found = {str(each.relative_to(ROOT)) for each in texts if each.is_file() and taken.search(each.read_text("utf-8"))}
    assert found == {"tests/core/test_extras.py"}  # an installation of unknown origin


def test_the_packages_have_extras_of_their_own() -> None:
    check_message(install_command("zstd", "palaestra-slots"), ROOT, "/packages/slots")


def test_torch_need_not_bring_cuda() -> None:
    assert "CPU build" in install_command("train")


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.3.285", "inspect-ai 0.3.285"),
        ("0.3.1000.dev1", "inspect-ai 0.3.1000.dev1"),
        ("0.3.9", "inspect-ai 0.3.9 (needs <0.4,>=0.3.285)"),
        ("0.4.0", "inspect-ai 0.4.0 (needs <0.4,>=0.3.285)"),
    ],
)
def test_the_version_of_an_extras_package_is_compared_with_its_bounds(
    version: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"inspect_ai-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: inspect-ai\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert extra_version("inspect") == found
    assert extra_version("no-such-extra") == ""
