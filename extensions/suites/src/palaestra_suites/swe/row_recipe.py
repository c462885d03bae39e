"""Read how the tests of a row in another language than Python are installed and run, in the columns of several data
sets.

- `eval_script`, `log_parser`, `eval_type` (SWE-bench 5, Multilingual, Multimodal): the commands between the markers of
  the test output are the tests; those before them, without git and conda, prepare the tests.
- `install_config` (SWE-rebench V2): `install`, `pre_install`, `test_cmd`, `log_parser`.
- `test_cmds`, `rebuild_cmds`, `log_parser` (SWE-bench-Live).
- `selected_test_files_to_run` (SWE-bench Pro): the files that the tests run, by the way of the language. Its
  `before_repo_set_cmd` only puts the test files in, which grading does itself.
- otherwise the way of the language (`languages.py`).

Invariant: commands of a row run in a slot only, and never get a network while they test.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.images.task_files import RowFields
from palaestra_suites.grading import log_parsers
from palaestra_suites.swe.languages import (
    LANGUAGES,
    PYTHON,
    Language,
    language_called,
    language_names,
    language_of_files,
    language_of_parser,
)

_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
_NOT_OURS = re.compile(
    r"\s*(?:#|set [-+]|:\s|(?:sudo\s+)?apt(?:-get)?\s|sudo\s|git\s|source\s|\.\s|conda\s|locale-gen|cat\s+/tmp|"
    r"cd\s+\S+\s*$)"
)
"""Lines of scripts that grading does itself, or that need an image: git, conda, packages of the system."""
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True, slots=True)
class RowRecipe:
    """How to run the tests of a row and read their log.

    `install` runs once per commit, with a network. `build` and `tests` run for each session of tests, without one. With
    `fail_only`, the log lists only failed tests, so a test that it does not name has passed.
    """

    language: Language
    parser: str
    install: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    fail_only: bool = False
    version: str = ""

    def read(self, log: str, instance_id: str) -> log_parsers.Statuses:
        """Return the statuses of the tests in a log. Raises `TaskError` for an unknown parser."""
        return log_parsers.parser(self.parser, instance_id, self.version)(log)

    @property
    def prebuilds(self) -> bool:
        """Whether the untouched repository is built once, in directories that sessions of tests use again: those of the
        language's own build."""
        return bool(self.language.build) and (not self.tests or self.language.name in ("go", "rust"))

    def install_script(self) -> str:
        return "\n".join(self.install) or self.language.install

    def test_script(self, repo: str, repo_dir: str) -> str:
        """Return the shell text that runs the tests in `repo_dir`; data sets know the repository by another path."""
        text = "\n".join((*self.build, *(self.tests or (self.language.test,))))
        return re.sub(rf"(?<![\w./-])/(?:testbed|app|{re.escape(repo.rpartition('/')[2])})\b", repo_dir, text)


def language_of(row: RowFields, changed: Collection[str], names: Collection[str]) -> str:
    """Return the language of a row: its column, its log parser, or the files of its tests and its fix."""
    told = row.optional("language") or row.optional("repo_language")
    if told:
        return language_called(told)
    parser = log_parsers.short_name(parser_name(row))
    if found := language_of_parser(parser):
        by_files = language_of_files(changed)
        return by_files if {by_files, found} in ({"javascript", "typescript"}, {"c", "c++"}) else found
    files = [name.partition("::")[0] for name in names if "::" in name]
    return language_of_files(changed) or language_of_files(files) or PYTHON


def parser_name(row: RowFields) -> str:
    """Return the name of a row's log parser, or an empty string. SWE-bench-Live's parsers in the form of a program are
    not names, and no program of a row reads a log here."""
    recipe = row.decoded("install_config")
    told = recipe.get("log_parser") if isinstance(recipe, Mapping) else None
    name = row.optional("log_parser") or str(told or "")
    return "" if "\n" in name or "(" in name else name


def recipe_of(row: RowFields, language: str) -> RowRecipe:
    """Return the recipe of a row in another language than Python. Raises `TaskError` for a language or a parser that is
    unknown."""
    found = LANGUAGES.get(language)
    if found is None:
        raise TaskError(f"its tests are in {language}; rows run in {', '.join(language_names())}")
    parser = parser_name(row) or found.parser
    log_parsers.parser(parser)  # raises for an unknown one
    config = row.decoded("install_config")
    config = config if isinstance(config, Mapping) else {}
    build, tests = _of_script(row.optional("eval_script"))
    build += _ours(_text_list(row.values.get("rebuild_cmds")))
    tests += _text_list(config.get("test_cmd")) or _text_list(row.values.get("test_cmds"))
    install = _ours([*_text_list(config.get("pre_install")), *_text_list(config.get("install"))])
    return RowRecipe(
        language=found,
        parser=parser,
        install=tuple(install),
        build=tuple(build),
        tests=tuple(tests),
        files=selected_files(row),
        fail_only=row.optional("eval_type").lower() == "fail_only",
        version=row.optional("version"),
    )


def selected_files(row: RowFields) -> tuple[str, ...]:
    """Return the files of `selected_test_files_to_run`, without the names of tests after them."""
    value = row.values.get("selected_test_files_to_run")
    names = [str(name).partition(" | ")[0].partition("::")[0] for name in as_list(value)]
    return tuple(dict.fromkeys(name for name in names if _is_inside(name)))


def _is_inside(path: str) -> bool:
    return bool(path) and not path.startswith(("/", "-")) and ".." not in path.split("/")


def as_list(value: JSON) -> list[JSON]:
    """Return a list that may be JSON text or, in SWE-bench Pro, the text of a Python list. Text in another form is a
    list of one."""
    if not isinstance(value, str):
        return [] if value is None or not isinstance(value, Iterable) else list(value)
    text = value.strip()
    if not text.startswith("["):
        return [text] if text else []
    try:
        decoded = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return [text]
    return list(decoded) if isinstance(decoded, list) else [text]


def _of_script(script: str) -> tuple[list[str], list[str]]:
    """Return the commands of an evaluation script before the tests, and those that test."""
    before, _, rest = script.partition(_START)
    tested, ended, _ = rest.partition(_END)
    if not ended:
        return [], []
    lines = _without_documents(before.splitlines()[:-1])  # the last line begins the line of the marker
    return _ours(lines), [line for line in tested.splitlines()[1:-1] if line.strip()]


def _without_documents(lines: Iterable[str]) -> list[str]:
    """Return the lines without here-documents, which hold the test patch."""
    found: list[str] = []
    end = ""
    for line in lines:
        if end:
            end = "" if line.strip() == end else end
        elif (match := _HEREDOC.search(line)) is not None:
            end = match[1]
        else:
            found.append(line)
    return found


def _ours(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.strip() and not _NOT_OURS.match(line)]


def _text_list(value: JSON) -> list[str]:
    return [value] if isinstance(value, str) and value.strip() else [str(each) for each in as_list(value)]


def quoted(paths: Iterable[str]) -> str:
    """Return paths as words of a shell."""
    return " ".join(shlex.quote(path) for path in paths)
