"""The project's terms as types (Task, Outcome, Blame, Usage, Prices, Score), and `number`, which reads numbers of any
library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Any, TypeAlias

JSON: TypeAlias = Any
"""A value of any type, most often one that `json.dumps` accepts."""

Message: TypeAlias = dict[str, JSON]
"""One chat message in OpenAI's format: role, content, and tool_calls or tool_call_id where they apply."""


class Outcome(StrEnum):
    """The way a rollout ended. Endings that the agent caused are scored."""

    NATURAL = "natural"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    BUDGET = "budget"
    CANCELLED = "cancelled"
    API_ERROR = "api_error"
    INFRA_ERROR = "infra_error"

    @property
    def scored(self) -> bool:
        """Whether a rollout with this outcome gets a reward; other rollouts are recorded without one."""
        return self in _SCORED


_SCORED = frozenset({Outcome.NATURAL, Outcome.MAX_TURNS, Outcome.LENGTH, Outcome.BUDGET})


class Blame(StrEnum):
    """The part that made a rollout fail; `engine` is the model server, `filter` a content filter that withheld the
    model's reply."""

    MODEL = "model"
    TASK = "task"
    TOOL = "tool"
    SANDBOX = "sandbox"
    ENGINE = "engine"
    FILTER = "filter"
    GRADER = "grader"
    RUN = "run"


class Network(StrEnum):
    """The network of a slot. `OFF` is an empty network namespace, without even the host's loopback."""

    OFF = "off"
    ON = "on"


@dataclass(frozen=True, slots=True)
class AllowList:
    """The only hosts that a slot may reach, over HTTP and HTTPS through a proxy.

    Examples: `example.org` (ports 80 and 443), `example.org:8443`, `*.example.org:*`, `10.0.0.0/8:5432`. Addresses of
    cloud metadata services, which provide credentials, are always refused. Raises ValueError if `hosts` is a plain
    string.
    """

    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        given: JSON = self.hosts
        if isinstance(given, str):
            raise ValueError(f"the hosts must be a list, such as [{given!r}]")
        object.__setattr__(self, "hosts", tuple(given))


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The network of each phase of a rollout. Grading has no network unless a task sets one.

    Each field is a `Network`, an `AllowList`, or the string `on` or `off`. Raises ValueError for any other value.
    """

    prepare: Network | AllowList = Network.OFF
    agent: Network | AllowList = Network.OFF
    grade: Network | AllowList = Network.OFF

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, parse_network(getattr(self, each.name)))


def parse_network(value: JSON) -> Network | AllowList:
    """Return the network that a value stands for. Raises ValueError."""
    if isinstance(value, AllowList):
        return value
    try:
        return Network(value)
    except ValueError:
        raise ValueError(f"a network is 'on', 'off' or an AllowList of hosts, not {value!r:.100}") from None


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum resources of one slot. Sizes are in bytes, `cpus` in cores. None means the backend's default.

    Raises ValueError if a limit is not a positive number or, except for `cpus`, is not a whole number.
    """

    memory_bytes: int | None = 2 << 30
    cpus: float | None = None
    pids: int | None = 512
    disk_bytes: int | None = 2 << 30
    open_files: int | None = 4096

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not 0 < value < math.inf:  # also false for NaN
                raise ValueError(
                    f"the limit {each.name} of a slot must be positive, not {value}; use None for the backend's default"
                )
            if value is not None and each.name != "cpus" and not isinstance(value, int):  # such as 2e9
                if value != int(value):
                    raise ValueError(f"the limit {each.name} of a slot must be a whole number, not {value}")
                object.__setattr__(self, each.name, int(value))


@dataclass(frozen=True, slots=True)
class ToolStep:
    """One tool call of a reference solution, which the scripted `oracle` policy makes in one turn."""

    name: str
    arguments: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Say:
    """Plain text in a reference solution. It ends the agent's turn in an environment that may then send another
    message."""

    text: str


Solution: TypeAlias = str | Sequence[ToolStep | Say | str]
"""A reference solution: a shell script (one terminal call), or steps in order, each a tool call, a command or text."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    `prompt` is the user's message, or a list of messages. `files` maps paths (relative ones lie in the workspace) to
    contents; `setup` is a shell script that runs once per group in the workspace. `image` is a root file system: a
    directory, a tar file or an OCI layout; None means an allow-list of the host's system directories. If
    `toolsets` is None, the environment chooses.

    `recipe` declares that the prepared workspace depends only on image, files, setup, the environment's hooks, the task
    and this string (a version); runs on this machine then share the workspace. If `recipe` is None, every run prepares
    its own workspace.

    A check sees the agent's changes in the workspace, in `/var/tmp` and below `paths`; it sees the rest of the root
    file system as it was prepared. A task that installs programs needs `/` in `paths`. `programs` names programs and
    their settings that the agent may add or replace; a check uses the prepared versions of all other programs and
    settings.

    `floor` is the highest score that is possible without doing the work; `palaestra env check` enforces it.
    `solutions` are further reference solutions, each a different correct way to do the task; `env check` plays them
    too, and each must get the full score. `wrong_solutions` are work that must get no more than `floor`, for example
    because it breaks a rule of the prompt. `data`, `answer` and all solutions never enter an agent's slot.

    `packages` are Python packages that the task's sandboxes have, in addition to those of its environment: requirements
    such as `pandas==2.3.3`. They are installed once per image on this machine, and need no network in the sandbox.

    `max_turns` limits the model calls of a rollout, `time_limit` its seconds and `tokens` the tokens that it reads and
    writes. They, `system_prompt` and `temperature` come before those of the environment, and after what the user of a
    run sets. None leaves a value to the environment.
    """

    id: str
    prompt: str | Sequence[Message]
    image: str | None = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    setup: str | None = None
    recipe: str | None = None
    toolsets: Sequence[str] | None = None
    network: NetworkPolicy = NetworkPolicy()
    limits: Limits = Limits()
    grading: str = "sealed"
    floor: float = 0.0
    paths: Sequence[str] = ()
    programs: Sequence[str] = ()
    data: JSON = None
    solution: Solution | None = None
    solutions: Sequence[Solution] = ()
    wrong_solutions: Sequence[Solution] = ()
    answer: JSON = None
    max_turns: int | None = None
    time_limit: float | None = None
    tokens: int | None = None
    system_prompt: str | None = None
    temperature: float | None = None
    packages: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", str(self.id))  # rows of data sets often have numeric ids

    def messages(self) -> list[Message]:
        """Return the prompt as a new list of messages that the caller may extend."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]


@dataclass(slots=True)
class Usage:
    """The cost of a rollout's model calls, in tokens as the model server counted them, and the number of calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.calls += 1

    def merge(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.calls += other.calls


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a model's tokens, per million, in the user's currency."""

    prompt: float
    completion: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of these tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Label:
    """A sign, noticed while work was graded, that the work may not have earned its result.

    `name` is a short identifier such as `tests_edited`, which reports count; `evidence` names the file, test or call.
    `certain` means that no honest work can carry the label, so that the default reward of such work is 0.
    """

    name: str
    evidence: str
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its parts. `metrics` are numbers to average; `detail` is any other evidence.

    `official` is the verdict of the benchmark's published protocol on the work as the agent left it; None if the
    environment has no other verdict than `reward`. An environment sets `reward` to the verdict in the guarded view and
    ignores its `labels` there; `grading.reward.decide` applies the labels.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, JSON] = field(default_factory=dict)
    official: float | None = None
    labels: Sequence[Label] = ()


def number(value: object) -> float | None:
    """Return a number or bool of any library (numpy scalar, tensor, decimal) as a float, which is infinite if the
    number is too large; None for anything else. An array or tensor with exactly one value counts as that value."""
    item, plain = getattr(value, "item", None), value
    try:
        plain = item() if callable(item) else value
        return float(plain) if isinstance(plain, (Real, Decimal)) else None
    except OverflowError:
        return math.inf if plain == abs(plain) else -math.inf  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError):
        return None


def numeric_values(values: Mapping[str, JSON]) -> dict[str, float]:
    """Return the values that are numbers, as `number` reads them."""
    return {key: found for key, value in values.items() if (found := number(value)) is not None}
