"""Correct variants of solutions: other spellings, refactorings, added files. All of them must earn the whole reward.

A variant of Python sources is made by changes of the syntax tree that keep its meaning; one of shell commands by other
ways to run them. Each also does something on the side, as an agent does: writes notes, runs tests, commits.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from palaestra.envs.config.build import make_pool
from palaestra.envs.discovery import load_environment
from palaestra.envs.policy_runs import first_tasks, parse_settings, policy_runs
from palaestra.envs.run.run import opened
from palaestra.rollouts.environment import Environment
from palaestra_slots.core.types import Message, Task, ToolStep
from palaestra_suites.hermes_swe.programming_task import ProgrammingTask
from palaestra_suites.swe.swe_smith_oracle import SweEnvironment
from palaestra_suites.swe.workspace import solution_files
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import Act, OraclePolicy, Policy
from palaestra_tokens.server_group import ServerGroup

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = Callable[[ast.Module, Random], None]


def _functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _is_plain(function: Function) -> bool:
    """Whether nothing but plain names refers to the function's variables."""
    for node in ast.walk(function):
        if node is not function and isinstance(
            node, Function | ast.ClassDef | ast.Lambda | ast.Global | ast.Nonlocal | ast.Match | ast.ExceptHandler
        ):
            return False
        if isinstance(node, ast.Name) and node.id in ("locals", "vars", "eval", "exec", "super", "__class__", "dir"):
            return False
        if isinstance(
            node, ast.Import | ast.ImportFrom | ast.comprehension | ast.NamedExpr | ast.Yield | ast.YieldFrom
        ):
            return False
    return True


def _stored(function: Function) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def _arguments(function: Function) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def rename_variables(tree: ast.Module, random: Random) -> None:
    """Local variables get other names."""
    for function in filter(_is_plain, _functions(tree)):
        names = {name: f"{name}_{random.randrange(100)}" for name in _stored(function) - _arguments(function)}
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)


def name_results(tree: ast.Module, random: Random) -> None:
    """`return x` becomes an assignment and a return."""
    for function in filter(_is_plain, _functions(tree)):
        for body in _bodies(function):
            last = body[-1]
            if isinstance(last, ast.Return) and last.value is not None and random.random() < 0.6:
                target = ast.Name("result_of_this", ast.Store())
                body[-1:] = [
                    ast.Assign([target], last.value, lineno=0),
                    ast.Return(ast.Name("result_of_this", ast.Load())),
                ]


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for child in ast.walk(node):
        for name in ("body", "orelse"):
            body = getattr(child, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def swap_branches(tree: ast.Module, random: Random) -> None:
    """`if a: x else: y` becomes `if not a: y else: x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.orelse and random.random() < 0.6:
            test = node.test
            is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
            node.test = test.operand if is_not else ast.UnaryOp(ast.Not(), test)
            node.body, node.orelse = node.orelse, node.body


_MIRRORED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def mirror_comparisons(tree: ast.Module, random: Random) -> None:
    """`a < 1` becomes `1 > a`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _MIRRORED:
            number = isinstance(node.comparators[0], ast.Constant) and isinstance(node.comparators[0].value, int)
            if number and random.random() < 0.7:
                node.left, node.comparators = node.comparators[0], [node.left]
                node.ops = [_MIRRORED[type(node.ops[0])]()]


def spell_out_additions(tree: ast.Module, random: Random) -> None:
    """`a += 1` becomes `a = a + 1`."""

    class Speller(ast.NodeTransformer):
        def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
            number = isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
            if not (number and isinstance(node.target, ast.Name)) or random.random() < 0.3:
                return node
            loaded = ast.Name(node.target.id, ast.Load())
            return ast.Assign([node.target], ast.BinOp(loaded, node.op, node.value), lineno=0)

    Speller().visit(tree)


def extract_helpers(tree: ast.Module, random: Random) -> None:
    """Some results are computed by new functions of the module."""
    known = set(dir(builtins))
    helpers: list[ast.stmt] = []
    inner = {id(each) for outer in _functions(tree) for each in _functions(outer) if each is not outer}
    for function in filter(_is_plain, _functions(tree)):
        own = _arguments(function) | _stored(function)
        if own & known or function.decorator_list or id(function) in inner:  # which may use names of the outer one
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None or random.random() < 0.5 or len(helpers) > 5:
                continue
            used = [each for each in ast.walk(node.value) if isinstance(each, ast.Name | ast.Attribute | ast.Await)]
            if any(isinstance(each, ast.Await) for each in used) or any(
                isinstance(each, ast.Attribute) and each.attr.startswith("__") for each in used
            ):
                continue
            names = sorted({each.id for each in used if isinstance(each, ast.Name)} & own)
            name = f"_result_{random.randrange(10**6)}"
            arguments = ast.arguments([], [ast.arg(each) for each in names], None, [], [], None, [])
            helpers.append(ast.FunctionDef(name, arguments, [ast.Return(node.value)], [], lineno=0))
            node.value = ast.Call(ast.Name(name, ast.Load()), [ast.Name(each, ast.Load()) for each in names], [])
    place = _after_imports(tree)
    tree.body[place:place] = helpers


def _after_imports(tree: ast.Module) -> int:
    place = 0
    for index, node in enumerate(tree.body):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (text or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        place = index + 1
    return place


def reorder_functions(tree: ast.Module, random: Random) -> None:
    """Neighbouring functions and methods change places."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.Module | ast.ClassDef):
            continue
        for index in range(len(owner.body) - 1):
            pair = owner.body[index : index + 2]
            free = all(
                isinstance(each, Function) and not each.decorator_list and not _has_defaults(each) for each in pair
            )
            if free and pair[0].name != pair[1].name and random.random() < 0.5:
                owner.body[index : index + 2] = pair[::-1]


def _has_defaults(function: Function) -> bool:
    parts = [*function.args.defaults, *(each for each in function.args.kw_defaults if each is not None)]
    return any(not isinstance(each, ast.Constant) for each in parts) or function.returns is not None


def annotate_variables(tree: ast.Module, random: Random) -> None:
    """Assigned variables get a type."""
    for function in filter(_is_plain, _functions(tree)):
        for body in _bodies(function):
            for index, node in enumerate(body):
                single = (
                    isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
                )
                if single and random.random() < 0.4:
                    body[index] = ast.AnnAssign(node.targets[0], ast.Name("object", ast.Load()), node.value, simple=1)


def guard_with_assertions(tree: ast.Module, random: Random) -> None:
    """Functions begin with a condition that always holds."""
    for function in filter(_is_plain, _functions(tree)):
        docstring = ast.get_docstring(function, clean=False) is not None
        for name in sorted(_arguments(function))[:1]:
            if random.random() < 0.3:
                same = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Name(name, ast.Load())])
                function.body.insert(int(docstring), ast.Assert(same))


CHANGES: tuple[Change, ...] = (
    rename_variables,
    name_results,
    swap_branches,
    mirror_comparisons,
    spell_out_additions,
    extract_helpers,
    reorder_functions,
    annotate_variables,
    guard_with_assertions,
)


def varied_source(text: str, random: Random) -> str:
    """A source of another form and the same meaning."""
    tree = ast.parse(text)
    for change in random.sample(CHANGES, random.randrange(2, 5)):
        change(tree, random)
    made = ast.unparse(ast.fix_missing_locations(tree))
    compile(made, "variant", "exec")
    return f"{made}\n# Reworked: {random.randrange(10**6)}\n"


ON_THE_SIDE: tuple[str, ...] = (
    "true",
    "mkdir -p notes && echo 'what I found' > notes/FINDINGS.md",
    "mkdir -p tests && printf 'def test_of_mine():\\n    assert 1 + 1 == 2\\n' > tests/test_of_mine.py",
    "python3 -m pytest -q -x > /tmp/out.txt 2>&1; tail -1 /tmp/out.txt",
    "git add -A; git -c user.name=a -c user.email=a@b commit -qm 'Fix it'; git log --oneline | head -2",
    "printf 'print(1)\\n' > scratch_of_mine.py && python3 scratch_of_mine.py; cp scratch_of_mine.py /tmp/",
    "git config --global user.name me; echo 'alias ll=\"ls -l\"' >> ~/.bashrc; mkdir -p ~/.cache/x; touch ~/.cache/x/y",
    "git stash -q; git stash pop -q; find . -name '*.py' | head -3 | xargs wc -l",
    "python3 -c 'import sys, os, gc; print(sys.version_info[:2], os.getcwd(), gc.isenabled())'; ls -la /proc/self/fd",
)
"""What an agent may do besides its fix."""

AROUND: tuple[str, ...] = (
    "{}",
    "(\n{}\n)",
    "# now the work\n{}\n# done",
    "cat > /tmp/solve.sh <<'END_OF_SOLUTION'\n{}\nEND_OF_SOLUTION\nbash /tmp/solve.sh",
    "export LC_ALL=C.UTF-8\n{}\nls -la > /dev/null",
    "{}\nmkdir -p /tmp/mine && date > /tmp/mine/log",
    "umask 022\n{}\necho finished >&2",
)
"""Ways to run a shell script."""


def files_variant(files: Mapping[str, str], folder: str, random: Random) -> list[object]:
    """Steps that write varied sources and do something on the side."""
    steps = [
        ToolStep("write_file", {"path": f"{folder}/{path}", "content": varied_source(text, random)})
        for path, text in files.items()
    ]
    command = random.choice(ON_THE_SIDE)
    side = ToolStep("terminal", {"command": f"cd {folder}; {command}", "timeout": 120})
    return [*steps, side]


def steps_variant(steps: Sequence[object], random: Random) -> list[object]:
    """The steps of a solution, its shell commands run in another way, with something on the side."""
    around = random.choice(AROUND)
    made = [
        ToolStep(step.name, {**step.arguments, "command": around.replace("{}", str(step.arguments["command"]))})
        if isinstance(step, ToolStep) and step.name == "terminal" and "END" not in str(step.arguments["command"])
        else step
        for step in steps
    ]
    side = random.choice(["true", "ls -la > /dev/null", "mkdir -p /tmp/of-mine; touch ~/.mine", "echo ok"])
    return [*made, ToolStep("terminal", {"command": side})]


@dataclass(frozen=True)
class VariantPolicy(Policy):
    """Plays these steps in place of the task's own solution."""

    steps: Sequence[object]

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        assert context.task is not None
        task = replace(context.task, solution=list(self.steps))
        return OraclePolicy().act(replace(context, task=task), messages)


@dataclass(frozen=True)
class PlayedVariant:
    """A graded variant: `official` is its official verdict, and `tampering` are its labels, if any."""

    task_id: str
    number: int
    official: float | None
    reward: float | None
    tampering: str
    error: str


async def play_variants(
    reference: str,
    settings: Sequence[str],
    *,
    tasks: int,
    variants: int,
    seed: int = 0,
    workers: int = 3,
    skipped: Collection[tuple[str, int]] = (),
    report: Callable[[PlayedVariant], None] = lambda played: None,
) -> list[PlayedVariant]:
    """Grade variants of the solutions of an environment's first tasks, in the environment's own way.

    `skipped` has the task ids and numbers of variants that are not played.
    """
    form = load_environment(reference, Path.cwd())
    own = {} if settings else form.check_values()
    parsed = parse_settings("honest work", settings, env_type=form.config_type(), env_values=own)
    engine, width = ServerGroup(parsed.server_configs), asyncio.Semaphore(workers)
    async with contextlib.aclosing(engine), make_pool(parsed.env_config, local=True) as pool:
        await engine.start()
        environment = form.build(parsed.env_config, parsed.server_configs, engine)
        async with opened(environment), policy_runs(environment, pool) as runs:
            chosen = await first_tasks(environment, tasks)

            async def play(task: Task, number: int) -> PlayedVariant:
                steps = await _variant(environment, task, Random(f"{seed}:{task.id}:{number}"))
                async with width:
                    group = await runs.play(VariantPolicy(steps), task, number)
                each = group.trajectories[0] if group.trajectories else None
                tampering = "; ".join(f"{label.name}: {label.evidence}" for label in (each.labels if each else ()))
                error = group.error or (each.error or str(each.detail)[:600] if each else "no rollout")
                official, reward = (each.official_reward, each.reward) if each else (None, None)
                played = PlayedVariant(task.id, number, official, reward, tampering, error)
                report(played)
                return played

            wanted = [(task, number) for number in range(variants) for task in chosen]
            return await asyncio.gather(
                *(play(task, number) for task, number in wanted if (task.id, number) not in skipped)
            )


async def _variant(environment: Environment, task: Task, random: Random) -> list[object]:
    resolved = await environment.resolve(task)
    if isinstance(environment, SweEnvironment):
        row = resolved.data.row
        _, fixed = await solution_files(environment.repositories, row)
        texts = {path: file.text for path, file in fixed.items() if file is not None}
        return files_variant(texts, "/workspace", random)
    if isinstance(resolved.data, ProgrammingTask):
        return files_variant(resolved.data.solution or {}, "/workspace", random)
    return steps_variant(shell_steps(resolved), random)


def shell_steps(task: Task) -> list[object]:
    """A task's own solution as steps."""
    steps = [task.solution] if isinstance(task.solution, str) else list(task.solution or ())
    return [
        ToolStep("terminal", {"command": each, "timeout": 120}) if isinstance(each, str) else each for each in steps
    ]
