"""Calls of `RayExecutor` on a real Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from cluster.ray_nodes import ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group("ray"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster(num_cpus=2) as cluster:
        yield cluster.address


def test_calls_run_in_other_processes_and_raise_what_they_raise(address: str) -> None:
    from palaestra.cluster.ray_executor import RayExecutor

    async def rollout(number: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        return number * number, os.getpid()

    def fails() -> None:
        raise KeyError("a task")

    async def main(executor: RayExecutor) -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        calls = (loop.run_in_executor(executor, lambda each=each: asyncio.run(rollout(each))) for each in range(4))
        return await asyncio.gather(*calls)

    with RayExecutor(address) as executor:
        found = asyncio.run(main(executor))
        assert [each for each, _ in found] == [0, 1, 4, 9]
        assert os.getpid() not in {pid for _, pid in found}
        with pytest.raises(KeyError, match="a task"):
            executor.submit(fails).result(60)
        assert list(executor.map(pow, (2, 3), (3, 2))) == [8, 9]
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(fails)
