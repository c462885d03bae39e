"""`RayExecutor` runs functions on the nodes of a Ray cluster, for libraries that take an `Executor` of
`concurrent.futures`, such as `tinker_cookbook.rl.train.main(config, rollout_executor=...)`.

The functions and their arguments are pickled (by cloudpickle, so closures work), and each call runs in a process of its
own among Ray's workers. A run of Palaestra needs no executor: `--on ray` keeps a journal and continues after a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import ray

from palaestra.cluster.ray_launcher import RayLauncher
from palaestra.core.errors import ConfigError

_Result = TypeVar("_Result")


class RayExecutor(Executor):
    """Runs calls on the cluster at `address`, HOST:PORT, each on `num_cpus` CPUs of a node. Without an address, the
    cluster is that of `RAY_ADDRESS`, which a Ray job sets, or the one that runs on this machine. A call whose node is
    lost is repeated up to `retries` times; after that, its future raises Ray's error.

    Raises `ConfigError` if there is no cluster.
    """

    def __init__(self, address: str = "", *, num_cpus: float = 1.0, retries: int = 0) -> None:
        if num_cpus < 0 or retries < 0:
            raise ConfigError("RayExecutor: num_cpus and retries must be 0 or more")
        self._launcher: RayLauncher | None = RayLauncher(address, flag="RayExecutor")
        # Spread over nodes: Ray's default fills one node first, and its slots would be the bottleneck.
        options = {"num_cpus": num_cpus, "max_retries": retries, "scheduling_strategy": "SPREAD"}
        self._call = ray.remote(_call).options(**options)
        self._running: dict[Future[Any], ray.ObjectRef] = {}

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Run a call on a node. Raises `RuntimeError` after `shutdown`. Cancelling the future leaves the call running;
        `shutdown(cancel_futures=True)` ends it."""
        if self._launcher is None:
            raise RuntimeError("cannot schedule new futures after shutdown")
        reference = self._call.remote(fn, args, kwargs)
        future: Future[_Result] = reference.future()
        self._running[future] = reference
        future.add_done_callback(lambda done: self._running.pop(done, None))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and leave the cluster if this object has joined it. Calls that still run are waited for,
        unless `cancel_futures` ends them. If `wait` is false, the cluster is left by the end of this process."""
        launcher, self._launcher = self._launcher, None
        if cancel_futures:
            for reference in list(self._running.values()):
                ray.cancel(reference, force=True)
        if wait and launcher is not None:
            futures.wait(list(self._running))
            launcher.close()


def _call(fn: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
    return fn(*args, **kwargs)
