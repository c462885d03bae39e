"""Runs a task of Inspect as an environment: `palaestra run inspect:FILE.py@TASK`, or `inspect:PACKAGE/TASK`.

The task's samples become tasks, and its own scorers grade them. The agent of Palaestra plays in the place of the
model: the task's solvers run up to their one call of `generate`, which gives the prompt; for the score they run again,
and the call returns the rollout. The solvers `react` and `basic_agent` are not run, because the agent takes their part.
Scorers see the sealed workspace as Inspect's sandbox.

Loading a task runs the code of its file here, as for any environment. Samples run nothing here: their setup scripts and
files only reach the slot, and a file that a sample names on this machine must lie in the task's folder.

Needs the package `inspect-ai`. Source: `inspect_ai._eval` and `inspect_ai.solver` of Inspect 0.3.285.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
import posixpath
import shlex
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from inspect_ai import Task as InspectTask
from inspect_ai._eval.loader import load_file_tasks
from inspect_ai._eval.registry import task_create
from inspect_ai._eval.task.util import sample_messages
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.path import chdir_python
from inspect_ai._util.registry import (
    is_registry_object,
    registry_create,
    registry_lookup,
    registry_params,
    registry_unqualified_name,
)
from inspect_ai._util.url import data_uri_to_base64, is_data_uri, is_http_url
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ModelName,
    ModelOutput,
    get_model,
)
from inspect_ai.model._model import active_model_context_var, init_model_roles, model_roles
from inspect_ai.scorer import Target, value_to_float
from inspect_ai.solver import Solver, TaskState
from inspect_ai.tool import ToolCall
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec
from inspect_ai.util._sandbox import context

from palaestra import JSON, ConfigError, FunctionEnvConfig, Message, Say, Score, Slot, Task, environment
from palaestra_integrations.inspect_sandbox import PalaestraSandbox, settings_of
from palaestra_integrations.turns import prompt_length
from palaestra_slots import WorkError

_log = logging.getLogger(__name__)

_AGENTS = frozenset({"basic_agent", "react"})
_TOOLSETS = {"bash": "terminal", "bash_session": "terminal", "python": "terminal", "text_editor": "file"}
_ANSWERED_BY_TARGET = frozenset({"choice", "exact", "f1", "includes", "match"})
_LIMITS = ("message_limit", "token_limit", "turn_limit", "time_limit", "working_limit", "cost_limit")
_NOT_CARRIED = ("approval", "review", "cleanup", "epochs", "sentinel", *_LIMITS)
_HOST = "host"
"""The value of the setting `image` that stands for the host's system directories."""

_MODEL = "palaestra/agent"
_OF_THE_WORK = (OutputLimitExceededError, UnicodeDecodeError, TimeoutError, FileNotFoundError, NotADirectoryError,
                IsADirectoryError, PermissionError)  # fmt: skip


def inspect_form(name: str) -> InspectForm:
    """Return the form of an Inspect task: `FILE.py@TASK`, `FILE.py` with one task, or `PACKAGE/TASK`. Raises
    `ConfigError`."""
    path, _, task = name.partition("@")
    if not path.endswith(".py"):
        if registry_lookup("task", name) is None:
            raise ConfigError(f"no installed package has the Inspect task {name!r}; a file is inspect:FILE.py@TASK")
        function = registry_lookup("task", name)
        return InspectForm(name, function, Path(inspect.getfile(inspect.unwrap(function))).parent, f"inspect:{name}")
    file = Path(path).absolute()
    if not file.is_file():
        raise ConfigError(f"the file {file} of Inspect tasks does not exist")
    known = [found[0] for found in parse_decorators(file, "task")]
    if task not in known and (task or len(known) != 1):
        raise ConfigError(f"{file} has the Inspect tasks {', '.join(known) or '(none)'}; choose one with {path}@TASK")
    task = task or known[0]
    load_file_tasks(file)
    return InspectForm(task, registry_lookup("task", task), file.parent, f"inspect:{file}@{task}")


class InspectForm:
    """The form of an Inspect task. Its settings are the parameters of the task's function, `image` and `grader`."""

    kind = "function"
    command = "process"
    bound = None

    def __init__(self, task: str, function: Any, folder: Path, reference: str) -> None:
        self.reference = reference
        self._task, self._folder = task, folder
        self._parameters = dict(_parameters(function))
        self._loaded: _LoadedTask | None = None
        name = task.rpartition("/")[2]
        settings = [inspect.Parameter("image", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)]
        settings.append(settings[0].replace(name="grader"))

        def samples(**_: JSON) -> Iterator[Task]:
            return self._ready().tasks()

        samples.__name__ = name
        samples.__doc__ = inspect.getdoc(function) or f"The task {task} of Inspect."
        samples.__signature__ = inspect.Signature([*self._parameters.values(), *settings])  # type: ignore[attr-defined]
        self._form = environment(samples)
        self.name = self._form.name

        @self._form.score
        async def inspect_score(task: Task, rollout: Any, sandbox: Slot) -> Score:
            return await self._ready().score(task, rollout.messages, sandbox)

    @property
    def about(self) -> str:
        return self._form.about

    def config_type(self) -> type[FunctionEnvConfig]:
        return self._form.config_type()

    def defaults(self) -> tuple[None, Sequence[Any]]:
        return None, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(self, config: Any, servers: Sequence[Any] = (), server: Any = None) -> Any:
        """Create the Inspect task and return the environment of one run. Raises `ConfigError` if the task cannot be
        carried over."""
        given = {name: getattr(config, each.name) for name, each in self._parameters.items()}
        with chdir_python(str(self._folder)):  # here, because the working directory belongs to the whole process
            made = task_create(self._task, **given)
            self._loaded = _LoadedTask(made, self._folder, config.image, config.grader)
            self._loaded.check()
        return self._form.build(config, servers, server)

    def _ready(self) -> _LoadedTask:
        assert self._loaded is not None, "build comes first"
        return self._loaded


class _Opened(BaseException):
    """Ends the solvers at their call of `generate`. Not an Exception, which a solver might catch."""


@dataclass(slots=True)
class _Model:
    """The `generate` of the solvers. It ends them, or returns the messages of a rollout."""

    reply: Sequence[ChatMessage] | None = None
    calls: int = 0
    state: Any = None
    opening: list[Message] = field(default_factory=list)

    async def __call__(self, state: TaskState, *_: object, **__: object) -> TaskState:
        self.calls += 1
        self.state = state
        if self.calls > 1:
            raise ConfigError(
                "the task's solvers call the model more than once, which cannot be carried over; run it with "
                "`inspect eval --sandbox palaestra`"
            )
        self.opening = [_text_message(each) for each in state.messages]
        if self.reply is None:
            raise _Opened
        state.messages.extend(self.reply)
        said = [each for each in self.reply if isinstance(each, ChatMessageAssistant)]
        last = said[-1] if said else ChatMessageAssistant(content="")
        state.output = ModelOutput(model=_MODEL, choices=[ChatCompletionChoice(message=last, stop_reason="stop")])
        return state


@dataclass(frozen=True, slots=True)
class _LoadedTask:
    """An Inspect task with the run's settings. `folder` is the one from which its samples may take files."""

    task: InspectTask
    folder: Path
    image: str | None
    grader: str | None

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be carried over, and name in one line what is left out."""
        task = self.task
        if task.sample_source is not None:
            raise ConfigError(f"the task {task.name} makes samples while it runs, which cannot be carried over")
        if not task.scorer:
            raise ConfigError(f"the task {task.name} has no scorer, so its rollouts would have no reward")
        by_model = [name for name in map(_registered_name, task.scorer) if name.startswith("model_graded")]
        if by_model and self.grader is None:
            raise ConfigError(
                f"the scorer {by_model[0]} of {task.name} needs a model: set `grader` to a model of Inspect"
            )
        left_out = [name for name in _NOT_CARRIED if getattr(task, name, None)]
        agents = [_registered_name(each) for each in self._solvers() if _registered_name(each) in _AGENTS]
        if agents:
            left_out.append(f"the solver {agents[0]} and its tools, whose part the agent plays with tools of its own")
        if left_out:
            _log.warning("the Inspect task %s runs without %s", task.name, ", ".join(left_out))
        for sample in list(task.dataset)[:1]:
            self._check_solvers(sample)

    def _check_solvers(self, sample: Sample) -> None:
        first, second = (_run_in_thread(self._open_sample(sample)) for _ in range(2))
        if first.opening != second.opening:
            raise ConfigError(
                f"the solvers of {self.task.name} make another prompt each time, such as shuffled choices"
            )
        count = sum(_registered_name(each) in _AGENTS for each in self._solvers())
        if count and _registered_name(self._solvers()[-1]) not in _AGENTS:
            raise ConfigError(
                f"the solver {_registered_name(self._solvers()[-1])} of {self.task.name} follows an agent"
            )

    def tasks(self) -> Iterator[Task]:
        """Yield a task for each sample."""
        for number, sample in enumerate(self.task.dataset, start=1):
            yield self._carried(sample if sample.id is not None else sample.model_copy(update={"id": number}))

    def _carried(self, sample: Sample) -> Task:
        opened = _run_in_thread(self._open_sample(sample))
        tools = sorted(self._tool_names(opened.state))
        if unknown := [name for name in tools if name not in _TOOLSETS]:
            raise ConfigError(f"the tool {unknown[0]} of {self.task.name} cannot be carried over; Palaestra has "
                              f"its own for {', '.join(_TOOLSETS)}")  # fmt: skip
        files: dict[str, str | bytes] = {}
        for name, source in (sample.files or {}).items():
            place, _, rest = name.rpartition(":")
            if place not in ("", "default"):
                raise ConfigError(f"sample {sample.id} has a file for the sandbox {place!r}; there is only one")
            files |= _sample_files(rest, source, self.folder, sample.id)
        script = None if sample.setup is None else _sample_files("", sample.setup, self.folder, sample.id).get("")
        if sample.setup is not None and script is None:
            raise ConfigError(
                f"the setup of sample {sample.id} names a folder instead of a script: {sample.setup:.100}"
            )
        answers = {_registered_name(each) for each in self.task.scorer or ()} <= _ANSWERED_BY_TARGET and not tools
        target = sample.target if isinstance(sample.target, str) else next(iter(sample.target), "")
        return Task(
            id=str(sample.id),
            prompt=opened.opening,
            image=self._image(sample),
            files=files,
            setup=None if script is None else _script(script.decode(errors="replace")),
            toolsets=tuple(dict.fromkeys(_TOOLSETS[name] for name in tools)),
            data={"sample": sample.model_dump(mode="json", exclude_none=True)},
            answer=sample.target,
            solution=[Say(f"ANSWER: {target}" if sample.choices else target)] if answers and target else None,
        )

    async def score(self, task: Task, messages: Sequence[Message], slot: Slot) -> Score:
        """Return the score of a rollout: the mean over the task's scorers, whose values are metrics too. An error that
        the work caused in a scorer raises `WorkError`."""
        sample = Sample.model_validate(task.data["sample"])
        reply = _messages(messages[prompt_length(task, messages) :])
        values: dict[str, float] = {}
        detail: dict[str, JSON] = {}
        wanted = self.task.sandbox or sample.sandbox or task.toolsets
        async with _contexts(slot if wanted else None, self.grader):
            model = await self._run_solvers(sample, _Model(reply))
            if model.opening != task.messages():
                raise ConfigError(f"the solvers of {self.task.name} made another prompt for the score of {task.id}")
            for scorer in self.task.scorer or ():
                try:
                    score = await scorer(model.state, Target(sample.target))
                except _OF_THE_WORK as error:
                    raise WorkError(
                        f"the scorer {_registered_name(scorer)} failed on the work: {error!r:.300}"
                    ) from error
                if score is None:
                    raise ValueError(f"the scorer {_registered_name(scorer)} returned no score for {task.id}")
                values |= _score_numbers(_registered_name(scorer), score.value)
                detail[_registered_name(scorer)] = {"answer": score.answer, "explanation": score.explanation}
        return Score(sum(values.values()) / len(values), metrics=values, detail=detail)

    async def _open_sample(self, sample: Sample) -> _Model:
        model = _Model()
        try:
            await self._run_solvers(sample, model)
        except _Opened:
            return model
        except (ProcessLookupError, ValueError) as error:  # a solver asked for a sandbox, or for a model of its own
            raise ConfigError(f"the solvers of {self.task.name} cannot be carried over: {error}") from error
        raise ConfigError(f"the solvers of {self.task.name} never call `generate`, so there is nothing to play")

    async def _run_solvers(self, sample: Sample, model: _Model) -> _Model:
        state = TaskState(
            model=ModelName(_MODEL),
            sample_id=sample.id or 0,
            epoch=1,
            input=sample.input,
            messages=sample_messages(sample),
            target=Target(sample.target),
            choices=sample.choices,
            metadata=dict(sample.metadata or {}),
        )
        for solver in self._solvers():
            if _registered_name(solver) in _AGENTS:
                state = await _opening_of_agent(solver, state, model)
                state = await model(state)
            else:
                state = await solver(state, model)
        model.state = state
        return model

    def _solvers(self) -> list[Solver]:
        return [*_flat(self.task.setup), *_flat(self.task.solver)]

    def _tool_names(self, state: TaskState) -> set[str]:
        found = {_registered_name(tool) for tool in state.tools}
        for solver in self._solvers():
            given = registry_params(solver).get("tools") if _registered_name(solver) in _AGENTS else None
            found |= {str(each.get("name")) for each in given or () if isinstance(each, dict)}
        return found

    def _image(self, sample: Sample) -> str | None:
        """Return the image of a sample's sandbox. Raises `ConfigError` for a Dockerfile or a compose file."""
        spec: SandboxEnvironmentSpec | None = sample.sandbox or self.task.sandbox
        if self.image == _HOST:
            return None
        if self.image is not None or spec is None or spec.config is None:
            return self.image and str(Path(self.image).absolute())
        if spec.type != "palaestra":
            raise ConfigError(
                f"sample {sample.id} runs in the image of {spec.config!r:.100}: set `image` to a root file system, "
                f"such as the tar file of `docker export`, or to `{_HOST}` for the host's programs"
            )
        return settings_of(spec.config).image


async def _opening_of_agent(solver: Solver, state: TaskState, model: _Model) -> TaskState:
    """Add the messages that an agent's parameters set, in the place of its own about submitting."""
    given = registry_params(solver)
    prompt = given.get("prompt")
    instructions = prompt[0] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt else prompt
    if isinstance(instructions, str):
        given = {"init": {"name": "system_message", "params": {"template": instructions}}}
    for each in [given["init"]] if isinstance(given.get("init"), dict) else given.get("init") or ():
        state = await registry_create("solver", each["name"], **each["params"])(state, model)
    return state


@asynccontextmanager
async def _contexts(slot: Slot | None, grader: str | None) -> AsyncIterator[None]:
    """Bind the sandbox and the grading model for Inspect's own functions."""
    with ExitStack() as stack:
        if slot is not None:
            sandboxes = {"default": PalaestraSandbox(slot)}
            stack.enter_context(_bound(context.sandbox_environments_context_var, sandboxes))
            stack.enter_context(_bound(context.sandbox_with_environments_context_var, {}))
            stack.enter_context(_bound(context.sandbox_default_context_var, "default"))
        if grader is not None:
            before = model_roles()
            stack.enter_context(_bound(active_model_context_var, get_model(grader)))
            init_model_roles({**before, "grader": get_model(grader)})
            stack.callback(init_model_roles, before)
        yield


@contextmanager
def _bound(variable: Any, value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _parameters(function: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the names of the parameters that can be settings, each with a parameter under the setting's name. A name
    that settings of all environments have gets the prefix `task_`; a parameter for other than plain values keeps its
    default."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:
        signature = inspect.signature(function)
    for each in signature.parameters.values():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or not _is_plain(each.annotation):
            continue
        clash = each.name in FunctionEnvConfig.model_fields or hasattr(FunctionEnvConfig, each.name)
        name = f"task_{each.name}" if clash or each.name in ("image", "grader") else each.name
        if not name.startswith("_"):
            yield each.name, each.replace(name=name, kind=each.KEYWORD_ONLY)


def _is_plain(annotation: Any) -> bool:
    if get_origin(annotation) is Literal or annotation in (str, int, float, bool, type(None), inspect.Parameter.empty):
        return True
    parts = get_args(annotation)
    return get_origin(annotation) in (list, dict, Union, UnionType) and all(map(_is_plain, parts))


def _flat(solver: Any) -> list[Solver]:
    """Return the steps of a chain of solvers. A chain that has a name of its own, such as `basic_agent`, is one."""
    if solver is None:
        return []
    if isinstance(solver, Sequence) and not is_registry_object(solver):
        return [step for each in solver for step in _flat(each)]
    return [solver]


def _registered_name(registered: Any) -> str:
    if is_registry_object(registered):
        return str(registry_unqualified_name(registered))
    return str(getattr(registered, "__name__", type(registered).__name__))


def _text_message(message: ChatMessage) -> Message:
    """Return a message of a prompt in OpenAI's format. Raises `ConfigError` for anything but text."""
    content = message.content
    if not isinstance(content, str) and any(part.type != "text" for part in content):
        raise ConfigError(f"a message of the prompt has {content[0].type}; only text can be carried over")
    if message.role == "tool" or getattr(message, "tool_calls", None):
        raise ConfigError("the prompt has tool calls, which cannot be carried over")
    return {"role": message.role, "content": message.text}


def _messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return messages in OpenAI's format, as a rollout has them, as Inspect's."""
    found: list[ChatMessage] = []
    functions: dict[str, str] = {}
    for each in messages:
        role, content = each["role"], each.get("content") or ""
        if role == "assistant":
            calls = [_inspect_call(call) for call in each.get("tool_calls") or ()]
            functions |= {call.id: call.function for call in calls}
            found.append(ChatMessageAssistant(content=content, tool_calls=calls or None, model=_MODEL))
        elif role == "tool":
            number = each.get("tool_call_id", "")
            found.append(ChatMessageTool(content=content, tool_call_id=number, function=functions.get(number)))
        else:
            found.append((ChatMessageSystem if role == "system" else ChatMessageUser)(content=content))
    return found


def _inspect_call(call: JSON) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return ToolCall(id=call["id"], function=function["name"], arguments={}, parse_error=str(error))
    arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return ToolCall(id=call["id"], function=function["name"], arguments=arguments)


def _sample_files(name: str, source: str, folder: Path, sample: object) -> dict[str, bytes]:
    """Return the contents of a sample's file, or of the files of a folder: a data URI, a path in the task's folder, or
    the text itself. Raises `ConfigError` for a path outside of it and for an address, which a row must not choose."""
    if is_data_uri(source):
        return {name: base64.b64decode(data_uri_to_base64(source))}
    if is_http_url(source):
        raise ConfigError(f"sample {sample} has a file at {source:.100}; download it to the task's folder first")
    root = folder.resolve()
    try:
        path = (root / source).resolve() if source and "\n" not in source else None
        exists = path is not None and path.exists()
    except (OSError, ValueError):  # the text of a file, not a path
        return {name: source.encode()}
    if path is None or not exists:
        return {name: source.encode()}
    found = [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else [path]
    for each in found:
        if not each.resolve().is_relative_to(root):
            raise ConfigError(f"sample {sample} names the file {source}, which lies outside of the folder {root}")
    if path.is_dir():
        return {posixpath.join(name, each.relative_to(path).as_posix()): each.read_bytes() for each in found}
    return {name: path.read_bytes()}


def _run_in_thread(work: Coroutine[Any, Any, _Model]) -> _Model:
    """Run solvers in a thread of their own, because the caller may run in an event loop."""
    with ThreadPoolExecutor(1, "inspect") as thread:
        return thread.submit(asyncio.run, work).result()


def _script(setup: str) -> str:
    """Return a setup script for the shell, which starts the interpreter that the script's first line names."""
    first, _, _ = setup.lstrip().partition("\n")
    if not first.startswith("#!") or first.split("/")[-1].split()[-1] in ("bash", "sh"):
        return setup
    encoded = base64.b64encode(setup.lstrip().encode()).decode()
    return (
        f'script=$(mktemp) && echo {shlex.quote(encoded)} | base64 -d > "$script" && chmod +x "$script" && "$script"; '
        f'code=$?; rm -f "$script"; exit $code'
    )


def _score_numbers(name: str, value: Any) -> dict[str, float]:
    """Return the numbers of a score's value, by name."""
    convert = value_to_float()
    if isinstance(value, Mapping):
        return {f"{name}_{key}": convert(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {f"{name}_{number}": convert(each) for number, each in enumerate(value)}
    return {name: convert(value)}
