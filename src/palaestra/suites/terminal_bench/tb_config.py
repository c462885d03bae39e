"""What the terminal-bench environment can be told."""

from __future__ import annotations

from pydantic import Field

from palaestra.core.config import later
from palaestra.envs.api.dataset_env import ListedEnvConfig


class TerminalBench2EvalConfig(ListedEnvConfig):
    """Settings of the environment. Times that a task itself says go before those given here."""

    dataset_name: str | None = Field(
        default="NousResearch/terminal-bench-2",
        description="Harbor or Terminal-Bench 1 tasks: a folder, a file of packed ones, a hub name, or built-in.",
    )
    task_filter: str | None = Field(
        default=None, description="Tasks to take: names or patterns (`git-*`), separated by commas; category:NAME too."
    )
    skip_tasks: str | None = Field(default=None, description="Tasks to leave out, as in task_filter.")
    max_items: int = Field(default=0, ge=0, description="Tasks to take, at most; 0 means all.")
    shuffle: bool = Field(default=False, description="Take the tasks in an order drawn from the seed.")
    task_timeout: float = Field(default=1800, gt=0, description="Seconds for the agent, where a task does not say.")
    test_timeout: float = Field(default=180, gt=0, description="Seconds for the verifier, where a task does not say.")
    controls: bool = Field(default=True, description="Hold a verdict that pays against the same tests, made false.")
    eval_concurrency: int = later(0, "Tasks evaluated at once; max_num_workers says that here.")
    keep_programs: list[str] = Field(
        default=[], description="System programs that an agent may replace for good (the tasks are about them)."
    )
    live_tasks: str | None = Field(
        default=None,
        description="Tasks to grade in the agent's own slot, as in task_filter: those of running services.",
    )
    image_dir: str | None = Field(
        default=None, description="A folder of ready root file systems: NAME, NAME.tar, with NAME.json beside them."
    )
    images: dict[str, str] = Field(default={}, description="Ready root file systems of single tasks, NAME=PATH.")
    base_image: str | None = Field(
        default=None,
        description="A root file system to follow every Dockerfile over, in a slot; `host`: this machine's programs.",
    )
    builder: str = Field(
        default="", description="The command that builds images; empty: docker, podman or buildah, whatever answers."
    )
    build_network: bool = Field(default=True, description="Whether building an image reaches the network.")
    force_build: bool = Field(default=False, description="Build images again that are in the cache.")
    cache_dir: str = Field(
        default="~/.cache/palaestra", description="Root file systems, test tools and unpacked rows, on the host only."
    )
    enabled_toolsets: list[str] | None = Field(default=["default"], description="Toolsets the agent has.")
    group_size: int = Field(default=1, ge=1, description="Attempts at each task.")
    total_steps: int = Field(default=-1, ge=-1, description="Groups to process, at most; -1 means every task once.")
    allow_network: bool = Field(
        default=False, description="Let agents reach the network where their task allows it; solutions are out there."
    )
