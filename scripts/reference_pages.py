"""Write the reference pages from the code: commands, settings, Python, labels, errors and exit codes.

`python scripts/reference_pages.py` writes them; with `--check` it reports a page that differs from the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import palaestra
from palaestra.cli.main import COMMANDS, cli
from palaestra.envs.api.function_form import FunctionForm
from palaestra.envs.config.fields import BaseEnvConfig, HeldOutConfig, HermesAgentEnvConfig
from palaestra.rollouts.grading.labels import LABELS
from palaestra.tools.mcp.mcp_config import MCPServerConfig, MCPToolChoice
from palaestra.tools.settings import ToolSettings
from palaestra_gateway.config import GatewayConfig, PlatformConfig, UserLimits
from palaestra_gateway.session_reset import SessionResetPolicy
from palaestra_slots.core import errors
from palaestra_slots.core.config import all_settings
from palaestra_suites.endless_terminals.endless_terminals import EndlessTerminalsEnvConfig
from palaestra_suites.hermes_swe.hermes_swe import HermesSweEnvConfig
from palaestra_suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_tokens.config import APIServerConfig

PUBLIC = (
    "palaestra",
    "palaestra_slots",
    "palaestra_tokens",
    "palaestra_suites",
    "palaestra_toolsets",
    "palaestra_train",
    "palaestra_contract",
)
"""The packages with public names, in the order in which a name that several of them have belongs to one."""

TOPICS = {
    "Running": ("palaestra.envs.run", "palaestra.rollouts"),
    "Sandboxes": ("palaestra_slots.sandbox",),
    "Agents and tools": ("palaestra.agent", "palaestra.tools", "palaestra_slots.processes"),
    "Models and tokens": ("palaestra_tokens",),
    "Environments": ("palaestra.envs", "palaestra_suites"),
    "Errors": ("palaestra_slots.core.errors",),
    "Common types": ("palaestra",),
}
"""Topics of the Python reference, with the packages whose public names belong to each topic; the first topic that fits
counts."""


SETTINGS: dict[str, type[BaseModel]] = {
    "Run": BaseEnvConfig,
    "Tools": ToolSettings,
    "Agent and sandboxes": HermesAgentEnvConfig,
    "Held-out tasks": HeldOutConfig,
    "Model server": APIServerConfig,
}
"""The classes of the page of settings, by its headings."""

SUITES: dict[str, type[BaseModel]] = {
    "Environment endless_terminals": EndlessTerminalsEnvConfig,
    "Environment hermes_swe": HermesSweEnvConfig,
    "Environment swe_smith_oracle": SweSmithOracleEnvConfig,
    "Environment terminalbench_2": TerminalBench2EvalConfig,
}
"""The settings of the shipped environments, in addition to those of every environment."""

FILES: dict[str, tuple[str, dict[str, type[BaseModel]]]] = {
    "Gateway": (
        "Keys of the file `gateway.yaml`.",
        {
            "": GatewayConfig,
            "default_reset_policy.": SessionResetPolicy,
            "limits.": UserLimits,
            "platforms.NAME.": PlatformConfig,
        },
    ),
    "MCP servers": (
        "Keys of one server, in a file of MCP servers or under `env.mcp_servers`.",
        {"": MCPServerConfig, "tools.": MCPToolChoice},
    ),
}
"""Settings that only files have: a sentence, and the classes by the beginning of their keys."""

HOOK_ARGUMENTS = {
    "task": "`Task`: the task, with its `answer` and `data`",
    "state": "the object that the hook `state` made for this rollout",
    "messages": "the conversation so far",
    "rollout": "`Rollout`: the conversation, its calls and its end",
    "sandbox": "`Slot`: read and write files, run commands, fork",
    "rng": "`random.Random`, with a seed of the task",
    "run": "`ToolRun`: the sandbox and the task of the call",
}
"""What a hook gets for the name of a parameter."""


def pages() -> dict[str, str]:
    """Return each page's text by the name of its file."""
    made = {"commands": _commands(), "settings": _settings(), "python": _python(), "errors": _errors()}
    made["labels"] = _labels()
    return {f"{name}.md": "\n".join(lines) + "\n" for name, lines in made.items()}


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    folder = Path(__file__).parents[1] / "docs/reference"
    folder.mkdir(exist_ok=True)
    stale = [name for name, text in pages().items() if _read(folder / name) != text]
    if arguments == ["--check"]:
        print("".join(f"docs/reference/{name} is out of date: run `make reference`\n" for name in stale), end="")
        return 1 if stale else 0
    for name in stale:
        (folder / name).write_text(pages()[name], encoding="utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _commands() -> Iterator[str]:
    yield "# Commands\n\nThe help of every command, as `palaestra COMMAND --help` prints it.\n"
    context = click.Context(cli, info_name="palaestra", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield from _command(command, name, context, "##")


def _command(command: click.Command, name: str, parent: click.Context, heading: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
    yield f"\n{heading} {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _command(found, inner, context, heading + "#")


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield (
        "Every setting is a flag (`--env.NAME`, `--openai.NAME`), a key of a YAML file, and an environment variable "
        "(`PALAESTRA_ENV_NAME`, `PALAESTRA_OPENAI_NAME`). `palaestra run ENV --help-all` lists the settings of an "
        "environment."
    )
    seen: set[str] = set()
    for title, model in (SETTINGS | SUITES).items():
        prefix = "openai" if model is APIServerConfig else "env"
        yield f"\n## {title}\n"
        for name, field in all_settings(model).items():
            if f"{prefix}.{name}" in seen:
                continue
            if title in SETTINGS:
                seen.add(f"{prefix}.{name}")
            yield _setting(f"--{prefix}.{name}", field)
    for title, (sentence, models) in FILES.items():
        yield f"\n## {title}\n\n{sentence}\n"
        for prefix, model in models.items():
            for name, field in model.model_fields.items():
                yield _setting(f"{prefix}{name}", field)


def _setting(name: str, field: FieldInfo) -> str:
    kind = inspect.formatannotation(field.annotation).replace("typing.", "")
    value = field.get_default(call_default_factory=True)
    required = field.is_required()
    default = "required" if required else "" if isinstance(value, BaseModel) else f"default `{value!r}`"
    text = (field.description or "").replace("<", r"\<")
    return f"`{name}`\n: {text} ({', '.join(filter(None, (f'`{kind}`', default)))})\n"


def _python() -> Iterator[str]:
    yield (
        "# Python\n\nImport public names from `palaestra`, or from the package that an entry names: type checkers find "
        "those only there. [Python](../python.md) shows how to use them."
    )
    yield from _hooks()
    topics: dict[str, list[str]] = {title: [] for title in TOPICS}
    packages = [import_module(name) for name in PUBLIC]
    home = {name: package.__name__ for package in reversed(packages) for name in package.__all__}
    for name in sorted(home, key=str.lower):
        module = getattr(getattr(palaestra, name), "__module__", "palaestra")
        titles = (
            title
            for title, parts in TOPICS.items()
            if any(module == part or module.startswith(f"{part}.") for part in parts)
        )
        topics["Errors" if module == errors.__name__ else next(titles, "Common types")].append(name)
    for title, names in topics.items():
        yield f"\n## {title}"
        for name in names:
            yield from _entry(name, getattr(palaestra, name), home[name])


def _hooks() -> Iterator[str]:
    """Yield a table of the hooks of `@environment`: what `FunctionForm` accepts as their parameters."""
    yield "\n## Hooks of an environment\n\nA hook declares the parameters that it needs by name.\n"
    yield "| decorator | parameters | |\n|---|---|---|"
    body = ast.parse(textwrap.dedent(inspect.getsource(FunctionForm))).body[0]
    for method in (each for each in ast.walk(body) if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)):
        names = ", ".join(_hook_parameters(method)) or ("task, state, sandbox, run" if method.name == "tool" else "")
        if names:
            yield f"| `@env.{method.name}` | `{names}` | {_sentence(ast.get_docstring(method))} |"
    yield "\n| parameter | value |\n|---|---|"
    for name, meaning in HOOK_ARGUMENTS.items():
        yield f"| `{name}` | {meaning} |"


def _hook_parameters(method: ast.FunctionDef) -> list[str]:
    """Return the names that a method of `FunctionForm` gives `declare_hook`."""
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    known = [call.args[2] for call in calls if ast.unparse(call.func) == "declare_hook"]
    return re.findall(r"'(\w+)'", ast.unparse(known[0])) if known else []


def _entry(name: str, found: object, package: str) -> Iterator[str]:
    """Yield one public name: the package that it belongs to, what one writes to use it, its docstring and its
    members."""
    yield f"\n### {name}\n"
    if package != "palaestra":
        yield f"In `{package}`.\n"
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not found.__module__.startswith("palaestra"):
        alias = getattr(found, "__module__", "") in ("typing", "collections.abc")
        yield f"`{inspect.formatannotation(found)}`" if alias else f"A value of type `{type(found).__name__}`."
        return
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield f"```text\n{_signature(node)}\n```\n"
    else:
        public = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _private(each)]
        fields = [] if found in SETTINGS.values() else public
        start = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        lines = [f"    {_signature(start[0])}"] if start else [f"    {ast.unparse(each)}" for each in fields]  # type: ignore[arg-type]
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        yield "```text\n" + "\n".join([f"class {name}({bases}):" if bases else f"class {name}:", *lines]) + "\n```\n"
    yield inspect.cleandoc(found.__doc__ or "") if ast.get_docstring(node) else ""
    if found in SETTINGS.values():
        yield "\nIts fields are [settings](settings.md)."
    if isinstance(node, ast.ClassDef):
        yield from _members(node)


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each public method and each attribute with a docstring."""
    yield ""
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator) for decorator in each.decorator_list]
            if _private(each) or "overload" in decorators or any(name.endswith(".setter") for name in decorators):
                continue
            shown = each.name if "property" in decorators else _signature(each)
            yield f"- `{shown}`: {_sentence(ast.get_docstring(each))}".removesuffix(": ")
        elif isinstance(each, ast.AnnAssign | ast.Assign) and not _private(each) and (text := _text(after)):
            yield f"- `{_target(each)}`: {_sentence(text)}"


def _text(node: ast.stmt | None) -> str:
    """Return the text of a string that documents the attribute before it; empty for another statement."""
    return str(node.value.value) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""


def _target(node: ast.AST) -> str:
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])  # type: ignore[attr-defined]


def _private(node: ast.AST) -> bool:
    return (getattr(node, "name", None) or _target(node)).startswith("_")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}({arguments}){returns}"


def _sentence(text: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split()).replace("|", "\\|")


def _labels() -> Iterator[str]:
    yield "# Labels of reward hacking\n"
    yield (
        "A label is a sign, with evidence, that work may not have earned its result. Work with a label that is certain "
        "gets a reward of at most 0; [What a score says](../security/grading.md#what-a-score-says) has the rules.\n"
    )
    for name, meaning in sorted(LABELS.items()):
        yield f"`{name}`\n: {meaning}\n"


def _errors() -> Iterator[str]:
    yield "# Errors\n\nAll errors that Palaestra raises, and the exit code of a command that ends with each error.\n"
    yield "| error | kind of | exit code | blame | meaning |\n|---|---|---|---|---|"
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.PalaestraError):
            kinds = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
            blame = getattr(error, "blame", None)
            meaning = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split()).replace("|", "\\|")
            yield f"| `{name}` | {kinds} | {error.exit_code} | {blame.value if blame else ''} | {meaning} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
