"""The virtual environment of a public row, with packages of the row's date from the package index."""

import pytest

from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_suites.grading.harness import Status
from palaestra_suites.grading.repository_tests import run_files
from palaestra_suites.toolchain.interpreters import this_interpreter
from palaestra_suites.toolchain.repository_venv import VENV_DIR, RepositoryVenv, venv_toolchain
from palaestra_suites.toolchain.toolchain import Install
from suites.bench import REPO, Bench, RunBench

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.network]
SETUP = "from setuptools import setup\nsetup(name='pkg', version='1', packages=['pkg'], install_requires=['idna'])\n"
PINNED = '[build-system]\nrequires = ["setuptools~=62.6", "wheel"]\nbuild-backend = "setuptools.build_meta"\n'
PLAIN = ("--assert=plain",)  # pytest 6.0 cannot rewrite the assertions of a newer Python


@pytest.mark.timeout(300)
@pytest.mark.parametrize("project", ["", PINNED], ids=["no pin", "a backend without editable wheels"])
def test_packages_of_the_date_are_installed_and_an_old_pytest_reports(project: str, run_bench: RunBench) -> None:
    python = this_interpreter()
    install = Install(("pytest==6.0.2", "py==1.11.0"), pytest_args=PLAIN, editable=True)
    files = {"setup.py": SETUP, "pyproject.toml": project, "pkg/__init__.py": "a = 1\n",
             "test_a.py": "import pkg\ndef test_a(): assert pkg.a == 1\ndef test_b(): assert pkg.a == 2\n"}  # fmt: skip

    async def scenario(bench: Bench) -> None:
        slot = await bench.acquire("venv", spec=SlotSpec(network=Network.ON, mounts=python.mounts))
        for path, text in files.items():
            await slot.write_text(f"{REPO}/{path}", text)
        await RepositoryVenv(slot, REPO, python, "2021-12-01").make(install)
        shown = await slot.execute([f"{VENV_DIR}/bin/python", "-m", "pip", "list", "--format=freeze"], cwd="/")
        run = await run_files(slot, venv_toolchain(install, python), REPO, ["test_a.py"], timeout_s=60)
        assert "idna==3.3\n" in shown.output, "the newest version of the date"
        assert run.statuses == {"test_a.py::test_a": Status.PASSED, "test_a.py::test_b": Status.FAILED}
        assert run.complete, run.output

    run_bench(scenario)
