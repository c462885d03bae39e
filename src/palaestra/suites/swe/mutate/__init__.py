"""Procedural bugs: small changes of a source, as a person might get something wrong.

The idea of procedural bug injection is SWE-smith's (arXiv 2504.21798). Changes are found in the syntax tree and applied
to the text, inside functions only, and never in tests, docstrings or comments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from palaestra.suites.swe.mutate.expressions import (
    change_default,
    flip_comparison,
    negate_condition,
    off_by_one,
    swap_arguments,
    swap_arithmetic,
    swap_boolean,
    wrong_name,
)
from palaestra.suites.swe.mutate.mutation import Mutation, Proposal, Scope, Source, apply, scopes
from palaestra.suites.swe.mutate.statements import (
    break_loop,
    drop_branch,
    fix_condition,
    remove_statement,
    return_early,
)

__all__ = ["KINDS", "Mutation", "apply", "find_mutations"]

_FINDERS: tuple[Callable[[Scope], Iterator[Proposal]], ...] = (
    break_loop,
    change_default,
    drop_branch,
    fix_condition,
    flip_comparison,
    negate_condition,
    off_by_one,
    remove_statement,
    return_early,
    swap_arguments,
    swap_arithmetic,
    swap_boolean,
    wrong_name,
)

KINDS = tuple(finder.__name__ for finder in _FINDERS)
"""Every kind of mutation, by the name of what finds it."""


def find_mutations(source: str, path: str) -> list[Mutation]:
    """Every mutation of a module, in the order of the text and then of `KINDS`. Test files have none.

    Each result compiles. Raises SyntaxError for a source that does not.
    """
    if _is_test(path):
        return []
    parsed = Source(source)
    found = {}
    for scope in scopes(parsed):
        for finder in _FINDERS:
            for change in finder(scope):
                mutation = _mutation(parsed, path, scope, change)
                if _changes_and_compiles(parsed, mutation):
                    found[mutation.start, mutation.end, mutation.replacement] = mutation
    return sorted(found.values(), key=lambda mutation: (mutation.start, mutation.end, mutation.kind))


def _mutation(source: Source, path: str, scope: Scope, change: Proposal) -> Mutation:
    line = source.line_of(change.start)
    return Mutation(path, change.kind, change.start, change.end, change.replacement, scope.qualname, line)


def _changes_and_compiles(source: Source, mutation: Mutation) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            changed = apply(source.text, mutation)
            compile(changed, mutation.path, "exec", dont_inherit=True)
            return changed != source.text
    except (SyntaxError, ValueError):
        return False


def _is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    directories = {"test", "tests", "testing"}.intersection(pure.parts[:-1])
    return (
        bool(directories) or pure.name == "conftest.py" or pure.stem.startswith("test_") or pure.stem.endswith("_test")
    )
