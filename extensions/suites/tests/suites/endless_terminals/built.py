"""A task folder with a Dockerfile, and its check with the pytest that runs these tests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from palaestra.envs.config.build import make_pool
from palaestra_audit.cheats.proof import BANK, EnvironmentProof, Proof
from palaestra_suites.endless_terminals.endless_terminals import (
    EndlessEnvironment,
    EndlessTerminalsEnvConfig,
)
from palaestra_suites.toolchain.toolchain import DependencyCache

INITIAL = "def test_numbers():\n    assert open('/home/user/data/numbers.txt').read() == '1\\n2\\n'\n"
FINAL = "def test_sum():\n    assert open('/home/user/sum.txt').read().strip() == '3'\n"
DESCRIBED = {"name": "one", "description": "Write the sum to /home/user/sum.txt.", "truth": "it is 3"}
IMAGE = """FROM palaestra-tests/base:1
ENV WHERE=/home/user
WORKDIR /home/user
RUN printf '1\\n2\\n' > numbers.txt && chown -R 1000 /home/user
USER 1000
"""
BUILT = {
    "instruction.md": "Write the sum of numbers.txt to sum.txt.",
    "environment/Dockerfile": IMAGE,
    "environment/task.json": json.dumps(DESCRIBED),
    "environment/test_initial_state.py": INITIAL.replace("data/", ""),
    "tests/test_final_state.py": FINAL
    + "def test_owner():\n    import os\n    assert os.stat('/home/user/sum.txt').st_uid == 1000\n",
    "solution/solve.sh": "echo $(($(head -1 numbers.txt) + 2)) > $WHERE/sum.txt\n",
}


def checked(folder: Path, packages: DependencyCache, **settings: object) -> Proof:
    """The proof of that task alone: oracle, doing nothing, one cheat."""
    for name, text in BUILT.items():
        path = folder / "tasks/task_sum" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = {"local_tasks_dir": str(folder / "tasks"), "cache_dir": str(folder / "cache"), **settings}
    config = EndlessTerminalsEnvConfig(**own)  # type: ignore[arg-type]

    async def main() -> Proof:
        async with make_pool(config) as pool:
            environment = EndlessEnvironment(config, packages)
            await environment.open()
            return await EnvironmentProof(
                environment, pool, [cheat for cheat in BANK if cheat.name == "fake-python"]
            ).run(1)

    proof = asyncio.run(main())
    assert proof.proven
    return proof
