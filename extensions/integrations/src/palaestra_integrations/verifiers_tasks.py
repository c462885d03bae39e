"""Runs a taskset of verifiers as an environment: `palaestra run verifiers:PACKAGE`, or `verifiers:FILE.py`.

The taskset's tasks become tasks, its tool servers become tools, and its own rewards and metrics grade the rollouts. The
agent of Palaestra plays in the place of a harness. `setup` runs in the workspace of the group; `finalize` and the
rewards see the sealed workspace of the rollout as their runtime, and the rollout's messages as the trace.

Loading a taskset runs its code here, and so do its tools and rewards, as for any environment. Rows run nothing here:
what they contain reaches the slot alone.

Needs the package `verifiers`. Source: `Taskset`, `Task`, `Toolset`, `Trace` and `Runtime` of verifiers 0.4.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig
from verifiers.v1.state import State, state_cls
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import default_harness_id, environment_class, file_module, taskset_class

from palaestra import (
    JSON,
    ConfigError,
    FunctionEnvConfig,
    Message,
    PalaestraError,
    Score,
    Slot,
    Task,
    TaskError,
    ToolRun,
    environment,
)
from palaestra_integrations.turns import prompt_length
from palaestra_slots import Limits, WorkError

_log = logging.getLogger(__name__)

_LONGEST_S = 3600.0
_GB = 1 << 30
_ROLE = {"system": SystemMessage, "user": UserMessage}


def verifiers_form(name: str) -> VerifiersForm:
    """Return the form of a taskset: an installed package, or a file that names one class in `__all__`. Raises
    `ConfigError`."""
    if not name.endswith(".py"):
        try:
            found = taskset_class(name)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"verifiers finds no taskset {name!r}: {error}") from error
        own = environment_class(name)
        if own is not SingleAgentEnv or default_harness_id(name) != "bash":
            other = own.__name__ if own is not SingleAgentEnv else f"the harness {default_harness_id(name)}"
            raise ConfigError(f"{name} plays its tasks with its own {other}, which cannot be carried over")
        return VerifiersForm(name, found, f"verifiers:{name}")
    file = Path(name).absolute()
    if not file.is_file():
        raise ConfigError(f"the file {file} of a taskset does not exist")
    module = file_module(str(file))
    listed = [getattr(module, each, None) for each in getattr(module, "__all__", ())]
    classes = [each for each in listed if isinstance(each, type) and issubclass(each, vf.Taskset)]
    if len(classes) != 1:
        raise ConfigError(f"{file} must name exactly one Taskset in __all__, but names {len(classes)}")
    others = [each for each in listed if isinstance(each, type) and issubclass(each, (vf.Env, vf.Harness))]
    if others:
        raise ConfigError(f"{file} plays its tasks with {others[0].__name__}, which cannot be carried over")
    return VerifiersForm(file.stem, classes[0], f"verifiers:{file}")


class VerifiersForm:
    """The form of a taskset. Its setting `taskset` has the taskset's own settings, and `image` replaces the image of
    every task: a root file system, or `host`."""

    kind = "function"
    command = "process"
    bound = None

    def __init__(self, name: str, taskset: type[vf.Taskset[Any, Any]], reference: str) -> None:
        self.name, self.reference = name, reference
        self.about = inspect.getdoc(taskset) or f"The taskset {name} of verifiers."
        self._taskset = taskset
        self._form = self._declared(None)

    def config_type(self) -> type[FunctionEnvConfig]:
        config: type[FunctionEnvConfig] = self._form.config_type()
        return config

    def defaults(self) -> tuple[None, Sequence[Any]]:
        return None, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(self, config: Any, servers: Sequence[Any] = (), server: Any = None) -> Any:
        """Create the taskset and return the environment of one run. Raises `ConfigError` if it cannot be carried
        over."""
        return self._declared(_Loaded(self._taskset, self.name, config.taskset, config.image)).build(
            config, servers, server
        )

    def _declared(self, loaded: _Loaded | None) -> Any:
        """Return a function environment. Without `loaded`, only its settings can be used."""

        def tasks(taskset: dict[str, Any] = {}, image: str | None = None) -> Iterator[Task]:  # noqa: B006
            assert loaded is not None
            return loaded.tasks()

        tasks.__name__, tasks.__doc__ = self.name, self.about
        form = environment(toolsets=["terminal"])(tasks)

        @form.score
        async def verifiers_score(task: Task, rollout: Any, sandbox: Slot) -> Score:
            assert loaded is not None
            return await loaded.score(task, rollout.rollout_id, rollout.messages, sandbox)

        if loaded is not None:
            if loaded.sets_up:
                form.prepare(loaded.prepare)
            for name, function in loaded.tools():
                form.tool(name=name)(function)
        return form


class _Loaded:
    """A taskset with the settings of a run."""

    def __init__(
        self, taskset: type[vf.Taskset[Any, Any]], name: str, settings: Mapping[str, JSON], image: str | None
    ) -> None:
        config_type = concrete_type(taskset, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        try:
            self.config = config_type.model_validate({"id": name, **settings})
            self.taskset = taskset(self.config)
        except ValueError as error:
            raise ConfigError(f"the taskset {name} does not accept its settings: {error}") from error
        self.name, self.image = name, image
        self.kind: type[vf.Task[Any, Any, Any]] = taskset.task_type()
        self.sets_up = self.kind.setup is not vf.Task.setup
        self._tasks: dict[str, vf.Task[Any, Any, Any]] = {}
        self._states: dict[str, State] = {}
        for hook in ("stop", "intercept"):
            if found := [each for each in dir(self.kind) if getattr(getattr(self.kind, each, None), hook, False)]:
                raise ConfigError(f"{self.kind.__name__}.{found[0]} is a {hook} hook, which cannot be carried over")

    def tasks(self) -> Iterator[Task]:
        for task in self.taskset:
            yield self._carried(task)

    def _carried(self, task: vf.Task[Any, Any, Any]) -> Task:
        data = task.data
        for field in ("skills", "agent_user", "workdir", "network_block"):
            if getattr(data, field):
                raise TaskError(f"the task {data.idx} of {self.name} sets {field}, which cannot be carried over")
        if data.resources.gpu:
            raise TaskError(f"the task {data.idx} of {self.name} needs a GPU")
        if data.image and self.image is None:
            raise ConfigError(
                f"the task {data.idx} of {self.name} runs in the image {data.image!r:.100}: set `image` to a root file "
                "system of it, such as the tar file of `docker export`, or to `host` for the host's programs"
            )
        if data.prompt is None:
            raise TaskError(f"the task {data.idx} of {self.name} has no prompt, because a user opens the conversation")
        prompt = (
            [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _text_messages(data.prompt)
        )
        if data.system_prompt is not None:
            prompt.insert(0, {"role": "system", "content": data.system_prompt})
        number = data.id or data.name or str(data.idx)
        number = number if self._tasks.get(number, task).data.idx == data.idx else f"{number}-{data.idx}"
        self._tasks[number] = task
        image = None if self.image in (None, "host") else str(Path(str(self.image)).absolute())
        answer = getattr(data, "answer", None)  # a name that tasksets use; it is not copied into a slot
        answer = answer if isinstance(answer, str) else None
        return Task(id=number, prompt=prompt, image=image, limits=_limits(data), data={"key": task.key}, answer=answer)

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        """Run the `setup` of a task in its workspace. Raises `TaskError` if it keeps anything outside of it."""
        theirs = self._tasks[task.id]
        trace = _trace(theirs, (), State())
        trace.state = state_cls(type(theirs))()
        before = trace.state.model_dump()
        await theirs.setup(trace, SlotRuntime(sandbox))
        if trace.info or trace.metrics or trace.state.model_dump() != before:
            raise TaskError(
                f"the setup of {type(theirs).__name__} writes to the trace, but a workspace serves many rollouts"
            )

    async def score(self, task: Task, rollout_id: str, messages: Sequence[Message], slot: Slot) -> Score:
        """Return the weighted sum of the task's rewards. Raises what its hooks raise, and `WorkError` if a hook fails
        because the agent did not leave a readable file."""
        theirs = self._tasks[task.id]
        state = self._states.pop(rollout_id, None) or state_cls(type(theirs))()
        prompt = prompt_length(task, messages)
        trace, runtime = _trace(theirs, _nodes(messages, prompt), state), SlotRuntime(slot)
        try:
            await theirs.finalize(trace, runtime)
            await theirs.score(trace, runtime)
        except vf.TaskError as error:
            if isinstance(error.__cause__, PalaestraError):  # a failure of the slot, which the boundary has wrapped
                raise error.__cause__ from None
            if runtime.unreadable is not None and error.__cause__ is runtime.unreadable:
                raise WorkError(
                    f"a hook of {type(theirs).__name__} failed on the work: {error.__cause__!r:.300}"
                ) from error
            raise
        rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
        if not rewards:
            raise ValueError(f"{type(theirs).__name__} has no reward")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Score(trace.reward, metrics={**metrics, **rewards})

    def tools(self) -> Iterator[tuple[str, Callable[..., Awaitable[Any]]]]:
        """Yield the tools of all tool servers, with the names that the servers give them."""
        for place, toolset in enumerate(self._toolsets()):
            if toolset.config.url:
                raise ConfigError(
                    f"the tool server {type(toolset).__name__} runs at {toolset.config.url}: use `--mcp FILE` for it"
                )
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for method in discover_decorated(toolset, "tool"):
                name = getattr(method, "tool_name", None) or method.__name__
                yield f"{prefix}{name}", self._tool(place, method)

    def _toolsets(self) -> list[Any]:
        return [*self.kind.toolsets(self.config.task), *type(self.taskset).toolsets(self.config)]

    def _tool(self, place: int, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def call(run: ToolRun, task: Task, **arguments: JSON) -> Any:
            opened = await run.state(_Servers).of(self, run.task_id, task.id)
            answer = getattr(opened[place], method.__name__)(**arguments)
            return await answer if inspect.isawaitable(answer) else answer

        context = [
            inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY, annotation=ToolRun),
            inspect.Parameter("task", inspect.Parameter.KEYWORD_ONLY, annotation=Task),
        ]
        signature = inspect.signature(method, eval_str=True)
        own = [each.replace(kind=each.KEYWORD_ONLY) for each in signature.parameters.values()]
        call.__signature__ = inspect.Signature([*own, *context])  # type: ignore[attr-defined]
        call.__name__, call.__doc__ = method.__name__, method.__doc__ or method.__name__
        return call

    async def opened(self, rollout_id: str, task: str) -> list[Any]:
        """Return new tool servers for a rollout, which share the state of its trace."""
        theirs = self._tasks[task]
        state = self._states.setdefault(rollout_id, state_cls(type(theirs))())
        servers, per_task = self._toolsets(), len(self.kind.toolsets(self.config.task))
        for place, server in enumerate(servers):
            if isinstance(state, server._state_cls):
                server._inert_state = state
            await server.setup()
            if place < per_task:
                await server.setup_task(theirs.data)
        return servers


class _Servers:
    """The tool servers of one rollout. The first call of a tool starts them."""

    def __init__(self) -> None:
        self._opened: list[Any] | None = None

    async def of(self, loaded: _Loaded, rollout_id: str, task: str) -> list[Any]:
        if self._opened is None:
            self._opened = await loaded.opened(rollout_id, task)
        return self._opened

    async def aclose(self) -> None:
        for server in self._opened or ():
            await server._exit_stack.aclose()


class SlotRuntime(Runtime):  # type: ignore[misc]
    """A slot as the runtime of a task's hooks. A server in it cannot be reached from outside. `unreadable` is the error
    of the last file that could not be read."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.config = SubprocessConfig()
        self.unreadable: OSError | None = None
        self._slot = slot

    async def start(self) -> None:
        """The slot runs already."""

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        done = await self._slot.execute(argv, env=self.process_env(env), timeout_s=_LONGEST_S, stderr=True, spill=False)
        return ProgramResult(done.exit_code, str(done.metadata["stdout"]), str(done.metadata["stderr"]))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        command = ["/bin/sh", "-c", 'log=$1; shift; exec "$@" > "$log" 2>&1', "sh", log, *argv]
        await self._slot.spawn(command, env=self.process_env(env), stdin=False)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            return bytes(await super()._read(path, max_bytes))
        try:
            return await self._slot.read_bytes(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            self.unreadable = error
            raise

    async def write(self, path: str, data: bytes) -> None:
        await self._slot.write_bytes(path, data)

    async def expose(self, port: int) -> str:
        raise NotImplementedError("a port of a slot cannot be reached from outside")


def _limits(data: Any) -> Limits:
    standard, asked = Limits(), data.resources
    return Limits(
        memory_bytes=int(asked.memory * _GB) if asked.memory else standard.memory_bytes,
        cpus=asked.cpu,
        disk_bytes=int(asked.disk * _GB) if asked.disk else standard.disk_bytes,
    )


def _text_messages(messages: Sequence[Any]) -> list[Message]:
    """Return the messages of a prompt in OpenAI's format. Raises `TaskError` for anything but text."""
    found = []
    for each in messages:
        if not isinstance(each.content, str) or getattr(each, "tool_calls", None) or each.role == "tool":
            raise TaskError("a message of the prompt is more than text, which cannot be carried over")
        found.append({"role": each.role, "content": each.content})
    return found


def _trace(task: vf.Task[Any, Any, Any], nodes: Sequence[MessageNode], state: State) -> Any:
    """Return the trace of a rollout that has ended."""
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=list(nodes), is_completed=True, ok=True)
    trace.state = state
    return trace


def _nodes(messages: Sequence[Message], prompt: int) -> list[MessageNode]:
    """Return the messages of a rollout as one path. The replies after the first `prompt` messages count as sampled."""
    nodes: list[MessageNode] = []
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            calls = [
                ToolCall(
                    id=each["id"],
                    name=each["function"]["name"],
                    arguments=_arguments_text(each["function"]["arguments"]),
                )
                for each in message.get("tool_calls") or ()
            ]
            made: Any = AssistantMessage(content=content, tool_calls=calls or None)
        elif role == "tool":
            made = ToolMessage(tool_call_id=message.get("tool_call_id", ""), content=content)
        else:
            made = _ROLE[role](content=content)
        sampled = role == "assistant" and place >= prompt
        nodes.append(MessageNode(parent=place - 1 if place else None, message=made, sampled=sampled))
    return nodes


def _arguments_text(arguments: JSON) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
