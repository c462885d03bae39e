"""Ports an existing script to Palaestra: rewrites its imports, and lists code that cannot run or that nothing calls.

The script is read, never run. Only imports and uses of dotted module names change; all other bytes stay. The package's
attributes and parameters are looked up in its own classes, so the list of problems cannot become outdated. In this
module, "the contract" is the Python API for which existing scripts were written: its modules, classes and hooks.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

import palaestra
from palaestra.envs.discovery import CONTRACT_ROOTS, OLD_NAMES
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.io.plugins import is_own

_ELSEWHERE: Mapping[str, str] = {
    "create_tool_backend": "palaestra_contract.pools",
    "DockerDirectBackend": "palaestra_contract.pools",
    "NomadBackendConfig": "palaestra_cloud.nomad",
    "NomadToolBackend": "palaestra_contract.pools",
    "ToolBackend": "palaestra_slots.sandbox.pool",
    "EvalHandlingEnum": "palaestra.envs.config.fields",
    "ProcessSession": "palaestra_slots.processes.session",
    "ModalSandboxConfig": "palaestra_cloud.modal",
    "ModalToolBackend": "palaestra_contract.modal_tool_backend",
    "SlotState": "palaestra_slots.sandbox.slot",
    "FINISHED_TTL_SECONDS": "palaestra_slots.processes.session",
    "MAX_OUTPUT_CHARS": "palaestra_slots.core.reply_size",
    "MAX_PROCESSES": "palaestra_slots.processes.session",
    "ToolCallParser": "palaestra_tokens.parsers",
    **{
        name: f"palaestra_contract.helpers.{module}"
        for module, names in {
            "docker_images": "build_docker_image docker_image_exists",
            "evaluations": "EvalBase eval_runner evaluate_log",
            "message_history": "ensure_trajectory_token_limit strip_thinking truncate_thinking",
            "reward_functions": "CombinedReward FormatReward LegacyFunctionWrapper RewardFunction RewardRegistry",
            "sandbox_executor": "SandboxExecutor",
            "servers": "APIServer ManagedServer ManagedServerAdapter OpenAIServer OpenaiConfig SequenceNode "
            "parse_http_response",
            "statistics": "allclose_to_first compute_discounted_returns compute_grpo_process_supervision_advantages "
            "compute_stats get_std_min_max_avg pass_at_k select_best_index",
            "teacher_distillation": "TeacherDistillationConfig TeacherDistillationEnv",
            "tool_call_text": "ParseResult extract_tool_call parse_tool_call",
            "toolset_functions": "TOOLSETS get_all_toolsets get_toolset get_toolset_names resolve_multiple_toolsets "
            "resolve_toolset validate_toolset",
            "tool_functions": "check_rl_api_keys get_missing_keys rl_check_status rl_edit_config rl_get_current_config "
            "rl_get_results rl_list_environments rl_list_runs rl_select_environment rl_start_training rl_stop_training "
            "rl_test_inference",
            "training_tokens": "UNMASKED_ROLES tokenize_for_trainer",
            "type_definitions": "AgentHistory Content EvaluationConfigGeneral EvaluationMetrics EvaluationResults "
            "EvaluationSample GameHistory GameStep Observation UUID number",
        }.items()
        for name in names.split()
    },
}
"""Names of the contract that the package `palaestra` does not export, and the modules that define them."""

OF_MODULES: Mapping[tuple[str, str], str] = {
    ("atroposlib.envs.reward_fns", "registry"): "palaestra_contract.helpers.reward_functions",
    ("atroposlib.envs.reward_fns.registry", "registry"): "palaestra_contract.helpers.reward_functions",
    ("tools.terminal_tool", "terminal_tool"): "palaestra_contract.helpers.tool_functions",
    ("atroposlib.type_definitions", "AgentStep"): "palaestra_contract.helpers.type_definitions",
    ("atroposlib.type_definitions", "Message"): "palaestra_contract.helpers.type_definitions",
}
"""Names that mean different things in different modules of the contract, and the modules that define them."""

WITHOUT_EFFECT: Mapping[str, str] = dict.fromkeys(
    (
        *("apply_patches", "resize_tool_pool", "_tool_executor", "BudgetConfig", "DEFAULT_BUDGET"),
        *("DEFAULT_RESULT_SIZE_CHARS", "DEFAULT_TURN_BUDGET_CHARS", "DEFAULT_PREVIEW_SIZE_CHARS"),
    ),
    "palaestra_contract.without_effect",
)
"""Names for scripts that stay unchanged; in a ported script, the calls are deleted."""

NOT_NEEDED: Mapping[str, str] = {
    "apply_patches": "there is nothing to patch: delete the call",
    "resize_tool_pool": "tools need no thread pool: delete the call",
    "_tool_executor": "tools need no thread pool: delete the call of its shutdown",
    "BudgetConfig": "each tool limits its own results: leave budget_config out",
    "AIAgent": "use Agent from palaestra",
    "BatchRunner": "run `palaestra batch FILE`, or call palaestra.run",
    "SandboxServer": "start `palaestra serve executor`, or name a backend in tool_pool_mode",
    "app": "start `palaestra serve tools` or `palaestra serve executor`; tool_server_url='inprocess' needs no server",
    "tokenize_for_trainer_dpo": "atroposlib 0.4 does not have it either",
    "BaseLanguageEnv": "atroposlib 0.4 does not have it either; subclass BaseEnv",
    "registry": "write each tool as a typed function with @tool from palaestra, instead of registry.register",
    "ToolRegistryEntry": "write each tool as a typed function with @tool from palaestra",
}
"""Names without a counterpart, and what to do instead."""

HOOKS = frozenset((
    "_build_scored_item", "_collect_trajectory_local", "_collect_trajectory_sandbox",
    "_format_trajectory_for_display", "_resolve_tools_for_group", "_run_agent_loop", "_start_tool_backend",
    "_stop_tool_backend", "_use_managed_server", "_use_sandbox_backend", "add_rollouts_for_wandb",
    "add_train_workers", "build_agent_config", "build_task", "build_tools", "cleanup",
    "collect_trajectories", "collect_trajectory", "compute_reward", "config_init", "create_rollout_table",
    "env_manager", "env_step_checks", "evaluate", "evaluate_log", "format_prompt", "get_next_item",
    "handle_env", "handle_send_to_api", "load_checkpoint", "log_eval", "perf_stats",
    "postprocess_histories", "process_manager", "register_env", "run_agent", "save_checkpoint",
    "score_trajectory", "setup", "setup_agent_env", "setup_trajectory_workspace", "setup_wandb",
    "teardown_agent_env", "verify_and_score_trajectory", "wandb_log",
))  # fmt: skip
"""Methods of the contract's classes that the contract's runtime calls. Palaestra never calls a method that its own
class of the same name lacks."""

TWO_SHAPES = frozenset({"_build_scored_item", "_run_agent_loop"})
"""Hooks whose overrides may have the parameters of either version of the contract."""

PASSED_IF_WANTED = frozenset({"agent_result", "workspace_meta"})
"""Arguments that an override gets only if it has a parameter of that name."""

CLASSES = ("BaseEnv", "HermesAgentBaseEnv", "AgentEnv")
"""Classes that scripts subclass."""

_WIDTH = 100
_FOLDERS_ABOVE = 3
_NO_COUNTERPART = "it has no counterpart of this name"
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass(frozen=True, slots=True)
class Left:
    """A place in the script that the user must change by hand."""

    line: int
    what: str
    advice: str


@dataclass(slots=True)
class Ported:
    """The new text, the names that now come from this package, and the places to change by hand."""

    text: str
    names: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def counterpart(name: str, module: str = "") -> str | None:
    """Return the module of Palaestra from which a name of the contract can be imported, or None. `module` is the
    contract's module, if it is known."""
    if (module, name) in OF_MODULES:
        return OF_MODULES[module, name]
    return "palaestra" if name in public_names() else elsewhere().get(name)


@cache
def public_names() -> frozenset[str]:
    """Return the names that can be imported from `palaestra`: its own, and those of libraries and extensions."""
    others = (import_module(package).__all__ for package in palaestra.packages_with_names())
    return frozenset(palaestra.__all__).union(*others)


def elsewhere() -> Mapping[str, str]:
    """Return the modules of the names that `palaestra` itself does not export. Doors and suites offer theirs as entry
    points, because the contract imports neither."""
    offered = plugins.installed(OLD_NAMES).items()
    return {**_ELSEWHERE, **{name: point.module for name, point in offered}}


def advice(name: str, module: str = "") -> str:
    """Return advice on a name without a counterpart. `registry` is the registry of tools only in a module of tools."""
    if name == "registry" and "reward" in module:
        return f"{_NO_COUNTERPART}: copy the reward functions that the script uses into it"
    return NOT_NEEDED.get(name, _NO_COUNTERPART)


def port(source: str, path: str) -> Ported:
    """Return the script with its imports rewritten; modules next to `path` belong to the script. Raises `ConfigError`
    for a file that is not Python."""
    try:
        tree = ast.parse(source, path)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    script = _Script(source, tree, Path(path).absolute().parent)
    script.port_imports()
    script.check_calls()
    for kind in _classes(tree):
        script.check_class(kind)
    return script.ported()


class _Script:
    """A script, and the edits to its text."""

    def __init__(self, source: str, tree: ast.Module, folder: Path) -> None:
        self._data, self._tree, self._folder = source.encode("utf-8", "surrogatepass"), tree, folder
        self._starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", self._data))]
        self._edits: list[tuple[int, int, str]] = []
        self._left: set[Left] = set()
        self._names: set[str] = set()
        self._ours: dict[str, str] = {}  # names in the script that are names of this package
        self._optional = set(_guarded(tree))

    def ported(self) -> Ported:
        data = self._data
        for start, end, text in sorted(self._edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        left = sorted(self._left, key=lambda each: (each.line, each.what))
        return Ported(data.decode("utf-8", "surrogatepass"), sorted(self._names), left)

    def port_imports(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                self._port_import(node)
            elif isinstance(node, ast.ImportFrom):
                self._port_from(node)

    def check_calls(self) -> None:
        """List calls of this package's names with arguments that they do not take."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._ours:
                called = getattr(palaestra, self._ours[node.func.id], None)
                if callable(called) and (problem := _unbound(called, node)) is not None:
                    self._leave(node, f"{node.func.id}(…)", problem)

    def check_class(self, kind: ast.ClassDef) -> None:
        """List the hooks of a class that nothing calls, or whose parameters differ. Also list uses of attributes that
        its base class does not have, and calls of methods with arguments that they do not take."""
        family = self._family(kind)
        if family is None:
            return
        base, relatives = family
        known = set(_attributes(base)) | {name for each in relatives for name in _defined(each)}
        methods = [each for each in kind.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        for method in methods:
            if method.name in HOOKS and not hasattr(base, method.name):
                self._leave(method, f"{kind.name}.{method.name}", f"Palaestra's {base.__name__} never calls it")
            ours = inspect.getattr_static(base, method.name, None)
            comparable = method.name in HOOKS - TWO_SHAPES and not method.decorator_list
            if comparable and inspect.isfunction(ours) and (problem := _differs(ours, method.args)) is not None:
                self._leave(method, f"{kind.name}.{method.name}", problem)
        for node in _without_nested_classes(kind):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            owner = _owner(node)
            if owner is None:
                continue
            theirs = {name for each in relatives if each is not kind for name in _defined(each)}
            if node.attr not in (known if owner == "self" else set(_attributes(base)) | theirs):
                self._leave(node, f"{owner}.{node.attr}", f"Palaestra's {base.__name__} has no {node.attr}")
        for node in _without_nested_classes(kind):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = _owner(node.func), node.func.attr
                own = {name for each in relatives for name in _defined(each)}
                method = inspect.getattr_static(base, name, None)
                if owner is None or (owner == "self" and name in own) or not inspect.isfunction(method):
                    continue
                if (problem := _unbound(method, node, bound=True)) is not None:
                    self._leave(node, f"{owner}.{name}(…)", problem)

    # Imports

    def _port_import(self, node: ast.Import) -> None:
        statements, ours = [], False
        for alias in node.names:
            if alias.name.partition(".")[0] not in CONTRACT_ROOTS:
                self._check_installed(node, alias.name)
                statements.append(f"import {_import_text(alias)}")
                continue
            ours = True
            name = alias.asname or alias.name
            if "." in name:
                self._rewrite_chain(name)
                statements.append("import palaestra")
            else:
                statements.append(f"import palaestra as {name}")
            used = list(self._uses(name))
            for use in used:
                self._take_attribute(use, name)
        if ours:
            self._replace(node, statements)

    def _rewrite_chain(self, module: str) -> None:
        """Replace a dotted module by this package wherever one of the module's attributes is used."""
        for use in self._uses(module):
            start = self._offset(use.value.lineno, use.value.col_offset)
            assert use.value.end_lineno is not None
            assert use.value.end_col_offset is not None
            self._edits.append((start, self._offset(use.value.end_lineno, use.value.end_col_offset), "palaestra"))

    def _uses(self, module: str) -> Iterator[ast.Attribute]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and _dotted(node.value) == module:
                yield node

    def _take_attribute(self, node: ast.Attribute, module: str) -> None:
        where = counterpart(node.attr)
        if where == "palaestra":
            self._names.add(node.attr)
        elif where is not None:
            self._leave(node, f"{module}.{node.attr}", f"write from {where} import {node.attr}")
        else:
            self._leave(node, f"{module}.{node.attr}", advice(node.attr, module))

    def _port_from(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        if not _is_theirs(node):
            if module.partition(".")[0] == "palaestra":
                self._ours |= {alias.asname or alias.name: alias.name for alias in node.names}
            self._check_installed(node, module)
            return
        if node.names[0].name == "*":
            self._port_star(node, module)
            return
        own = self._own_module(node) if node.level == 1 else None
        statements: list[tuple[str, list[ast.alias]]] = []
        for alias in node.names:
            where = counterpart(alias.name, module)
            if where is None and own is not None:
                where = own
            elif where is None and node.level == 1 and node.module is None and self._is_own(alias.name):
                where = ""  # a module next to the script
            elif where is None and (uses := self._module_uses(alias)):
                for use in uses:
                    self._take_attribute(use, alias.asname or alias.name)
                where = "as"
            elif where is not None:
                self._names.add(alias.name)
                self._ours[alias.asname or alias.name] = alias.name
            if where is None:
                self._leave(node, f"from {module} import {alias.name}", advice(alias.name, module))
                where = module
            if statements and statements[-1][0] == where:
                statements[-1][1].append(alias)
            else:
                statements.append((where, [alias]))
        if any(where != module for where, _ in statements):
            statements.sort(key=lambda each: each[0] == module)
            merged: dict[str, list[ast.alias]] = {}
            for where, names in statements:
                merged.setdefault(where, []).extend(names)
            self._replace(node, list(merged.items()))

    def _port_star(self, node: ast.ImportFrom, module: str) -> None:
        """Replace a star import by the names that the script uses and does not define."""
        if node.level == 1 and (own := self._own_module(node)) is not None:
            self._replace(node, [f"from {own} import *"])
            return
        free = _free(self._tree)
        known = [name for name in sorted(free) if counterpart(name) is not None]
        imports = [each for each in ast.walk(self._tree) if isinstance(each, ast.ImportFrom)]
        stars = [each for each in imports if each.names[0].name == "*"]
        first = next(each for each in stars if _is_theirs(each))
        if all(_is_theirs(each) for each in stars):
            for name in sorted(free - set(known)):
                self._leave(node, f"{name} from {module} import *", advice(name, module))
        if node is not first or not known:
            self._replace(node, ["pass"])
            return
        by_module: dict[str, list[ast.alias]] = {}
        for name in known:
            by_module.setdefault(counterpart(name) or "", []).append(ast.alias(name))
            self._names.add(name)
            self._ours[name] = name
        self._replace(node, list(by_module.items()))

    def _module_uses(self, alias: ast.alias) -> list[ast.Attribute]:
        """Return the uses of an imported module, if every use is `module.NAME` with a NAME that this package has;
        otherwise none."""
        name = alias.asname or alias.name
        uses = list(self._uses(name))
        read = sum(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(self._tree)
        )
        return uses if len(uses) == read and all(counterpart(use.attr) == "palaestra" for use in uses) else []

    def _own_module(self, node: ast.ImportFrom) -> str | None:
        """Return the module next to the script that a relative import names; None if there is none."""
        return node.module if node.module is not None and self._is_own(node.module) else None

    def _is_own(self, module: str) -> bool:
        return _is_module(self._folder, module)

    def _is_nearby(self, root: str) -> bool:
        """Return whether a module is next to the script, in a folder above it, or in a folder next to or below the
        script. A script may extend `sys.path` by such a folder, or be started from it."""
        above = [self._folder, *self._folder.parents][:_FOLDERS_ABOVE]
        below = (Path(each.path) for folder in above[:2] for each in _entries(folder) if each.is_dir())
        return any(_is_module(folder, root) for folder in (*above, *below))

    def _check_installed(self, node: ast.Import | ast.ImportFrom, module: str) -> None:
        root = module.partition(".")[0]
        if node in self._optional or root in sys.stdlib_module_names or root == "palaestra" or self._is_nearby(root):
            return
        try:
            found = importlib.util.find_spec(root) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            self._leave(node, f"import {root}", "it is not installed: pip install its package, or delete the import")

    # Text

    def _leave(self, node: ast.stmt | ast.expr, what: str, way: str) -> None:
        self._left.add(Left(node.lineno, what, way))

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _replace(
        self, node: ast.Import | ast.ImportFrom, statements: Sequence[str | tuple[str, list[ast.alias]]]
    ) -> None:
        """Replace one import statement; other code on the same lines stays."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        before = self._data[self._starts[node.lineno - 1] : start].decode()
        alone = not before.strip()
        indent = before if alone else ""
        lines = [each if isinstance(each, str) else _statement(*each, indent=indent) for each in statements]
        text = f"\n{indent}".join(lines) if alone else "; ".join(lines)
        self._edits.append((start, self._offset(node.end_lineno, node.end_col_offset), text))

    def _family(self, kind: ast.ClassDef) -> tuple[type, list[ast.ClassDef]] | None:
        """Return the contract's class that the class `kind` derives from, with `kind` and its bases in the script. None
        if there is no such class, or if a base is unknown, because an unknown base may define anything."""
        local = {each.name: each for each in _classes(self._tree)}
        relatives, base = [kind], None
        for each in relatives:
            for parent in each.bases:
                name = _dotted(parent.value if isinstance(parent, ast.Subscript) else parent) or ""
                name = self._ours.get(name, name.rpartition(".")[2])
                if name in CLASSES:
                    base = getattr(palaestra, name)
                elif name in local and local[name] not in relatives:
                    relatives.append(local[name])
                elif name not in ("ABC", "Generic", "object"):
                    return None
        return None if base is None else (base, relatives)


def _is_module(folder: Path, module: str) -> bool:
    place = folder.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _is_theirs(node: ast.ImportFrom) -> bool:
    """Return whether an import is from a module of the contract, or relative."""
    return node.level > 0 or (node.module or "").partition(".")[0] in CONTRACT_ROOTS


def _guarded(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that run only for a type checker, or whose import error is caught."""
    for node in ast.walk(tree):
        body: Iterable[ast.stmt] = ()
        if isinstance(node, ast.If) and (_dotted(node.test) or "").endswith("TYPE_CHECKING"):
            body = node.body
        elif isinstance(node, ast.Try):
            caught = [handler.type for handler in node.handlers]
            names = {_dotted(each) for one in caught for each in (one.elts if isinstance(one, ast.Tuple) else [one])}
            body = node.body if names & {*_IMPORT_ERRORS, None} else ()
        for statement in body:
            yield from ast.walk(statement)


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _without_nested_classes(kind: ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes of a class, but not those of the classes inside it, whose `self` is another object."""
    waiting: list[ast.AST] = [kind]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.ClassDef)]


def _dotted(node: ast.expr | None) -> str | None:
    """Return `a.b.c` as text; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _owner(node: ast.Attribute) -> str | None:
    """Return the owner of an attribute: `self`, `super()`, or None for anything else."""
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        return "self"
    call = node.value
    return "super()" if isinstance(call, ast.Call) and _dotted(call.func) == "super" else None


def _defined(kind: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class sets in its body and on `self`."""
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _owner(node) == "self":
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attributes(cls: type) -> Iterator[str]:
    """Yield the attributes of a class of ours and of its instances."""
    yield from dir(cls)
    for each in cls.__mro__:
        if is_own(each.__module__):
            for node in _classes(ast.parse(inspect.getsource(each))):
                yield from _defined(node)


def _unbound(called: object, node: ast.Call, *, bound: bool = False) -> str | None:
    """Return why a call does not fit the called object's signature; None if it fits, or if only a run can decide."""
    if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
        return None
    try:
        signature = inspect.signature(called)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    first = [None] if bound else []
    try:
        signature.bind(*first, *node.args, **{each.arg or "": each.value for each in node.keywords})
    except TypeError as error:
        return f"its parameters differ in Palaestra: {error}"
    return None


def _differs(ours: Callable[..., object], theirs: ast.arguments) -> str | None:
    """Return why an override cannot be called like Palaestra's method; None if it can."""
    parameters = list(inspect.signature(ours).parameters.values())[1:]
    passed = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    always = [each for each in passed if each.default is each.empty]
    taken = [*theirs.posonlyargs, *theirs.args][1:]
    if len(taken) - len(theirs.defaults) > len(passed) or (len(taken) < len(always) and theirs.vararg is None):
        return f"Palaestra calls it with ({', '.join(each.name for each in passed)})"
    names = {each.arg for each in [*theirs.args, *theirs.kwonlyargs]}
    by_name = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty}
    if theirs.kwarg is None and (missing := sorted(by_name - names)):
        return f"Palaestra also passes {', '.join(f'{name}=' for name in missing)}"
    required = {each.arg for each, value in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True) if value is None}
    if unknown := sorted(required - {each.name for each in parameters} - PASSED_IF_WANTED):
        return f"Palaestra does not pass {', '.join(unknown)}"
    return None


def _free(tree: ast.Module) -> set[str]:
    """Return the names that a script reads but does not define."""
    read: set[str] = set()
    bound = set(dir(builtins)) | {"__file__", "__name__", "__doc__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            bound.add(node.name)
    return read - bound


def _import_text(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _statement(module: str, names: Sequence[ast.alias], *, indent: str) -> str:
    """Return a statement that imports the names from the module. If `module` is empty, the names are modules to import;
    if it is `as`, this package is imported under each name."""
    written = [_import_text(alias) for alias in names]
    if module in ("", "as"):
        own = (f"palaestra as {alias.asname or alias.name}" for alias in names)
        return f"import {', '.join(own if module else written)}"
    short = f"from {module} import {', '.join(written)}"
    if len(indent) + len(short) <= _WIDTH:
        return short
    return f"from {module} import (\n" + "".join(f"{indent}    {each},\n" for each in written) + f"{indent})"
