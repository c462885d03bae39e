"""The settings of the terminal-bench environment."""

from __future__ import annotations

from pydantic import Field

from palaestra.envs.config.fields import ListedEnvConfig
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_slots.images.task_images import PullPolicy


class TerminalBench2EvalConfig(ListedEnvConfig):
    """Settings of the environment. Times that a task sets take precedence."""

    dataset_name: str | None = Field(
        default="NousResearch/terminal-bench-2",
        description="Harbor or Terminal-Bench 1 tasks: a folder, a file of packed tasks, a Hub dataset, a dataset of a "
        "registry as `harbor:NAME@VERSION`, or built-in.",
    )
    registry: str | None = Field(
        default=None,
        description="Harbor's registry.json, or its folder, for `harbor:NAME`. Default: that of the current folder.",
    )
    task_filter: str | None = Field(
        default=None,
        description="The old name of --task: names, patterns (`git-*`) and category:NAME, separated by commas.",
    )
    skip_tasks: str | None = Field(default=None, description="Tasks to exclude, as in task_filter.")
    max_items: int = Field(default=0, ge=0, description="Maximum number of tasks; 0 means all.")
    shuffle: bool = Field(default=False, description="Shuffle the tasks, using `seed`.")
    task_timeout: float = Field(default=1800, gt=0, description="Seconds for the agent, unless the task sets them.")
    test_timeout: float = Field(default=180, gt=0, description="Seconds for the verifier, unless the task sets them.")
    controls: bool = Field(
        default=True, description="Check a positive verdict with rewritten tests, some of them falsified."
    )
    keep_programs: list[str] = Field(
        default=[], description="System programs that an agent may replace, for tasks about them."
    )
    live_tasks: str | None = Field(
        default=None,
        description="Tasks to grade in the agent's own slot, as in task_filter: tasks about running services.",
    )
    task_env_vars: dict[str, str] = Field(
        default={},
        description="Values for `${NAME}` in the tables `env` and `headers` of task.toml, which Harbor takes from its "
        "own environment, as NAME=VALUE. Records hide them, but agents can read those of `[environment.env]`.",
    )
    image_dir: str | None = Field(
        default=None,
        description="A folder of prebuilt root file systems: TASK or TASK.tar, with an optional TASK.json next to it.",
    )
    images: dict[str, str] = Field(default={}, description="Prebuilt root file systems for single tasks, as TASK=PATH.")
    base_image: str | None = Field(
        default=None,
        description="A root file system over which slots build every Dockerfile. `host` means this machine's programs, "
        "and `from` the image that FROM names, as `palaestra images pull` stored it.",
    )
    pull: PullPolicy = Field(
        default="never",
        description="Whether the images that tasks name are pulled: `never`, or if they are `missing` here.",
    )
    builder: str = Field(
        default="",
        description="The command that builds images. By default, the first of docker, podman and buildah that answers.",
    )
    build_network: bool = Field(default=True, description="Whether building an image reaches the network.")
    force_build: bool = Field(default=False, description="Rebuild images that are in the cache.")
    cache_dir: str = Field(
        default=CACHE_DIR,
        description="The folder of root file systems, test tools and unpacked rows, on the host only.",
    )
    enabled_toolsets: list[str] | None = Field(default=["default"], description="The agent's toolsets.")
    group_size: int = Field(default=1, ge=1, description="Attempts at each task.")
    total_steps: int = Field(default=-1, ge=-1, description="Maximum number of groups; -1 means one for every task.")
    allow_network: bool = Field(
        default=False,
        description="Let agents reach the network if their task allows it; solutions are published there.",
    )
