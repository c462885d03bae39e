import ast
import textwrap

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from palaestra_suites.swe.authoring.mutations import KINDS, Mutation, apply_mutation, find_mutations

SOURCE = textwrap.dedent('''
    """Doc with 1 < 2 and f(a, b)."""
    TOP = 1 + 2

    class C:
        def método(self, values, low=0, *, strict=True):  # ü: 1 < 2
            """Docstring: if x: return 1 + 1"""
            total = ""; n = 0
            for value in values:
                if value is None:
                    continue
                if not strict:
                    n += 1
                elif value < low:
                    values = list(values)
                else:
                    values.append(value)
                if strict and value == 3: n = max(n, "ü" == value)
            return n - low  # 1 < 2
''')


def lines_changed(mutation: Mutation) -> list[tuple[str, str]]:
    before, after = SOURCE.split("\n"), apply_mutation(SOURCE, mutation).split("\n")
    return [(old, new) for old, new in zip(before, after, strict=False) if old != new]


def test_every_kind_is_found_and_nothing_else() -> None:
    kinds = {mutation.kind for mutation in find_mutations(SOURCE, "pkg/c.py")}
    assert kinds == set(KINDS)
    assert len(KINDS) >= 8


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("flip_comparison", "elif value < low:", "elif value <= low:"),
        ("flip_comparison", "if value is None:", "if value is not None:"),
        ("swap_boolean", "strict and value", "strict or value"),
        ("negate_condition", "if not strict:", "if strict:"),
        ("fix_condition", "if value is None:", "if False:"),
        ("return_early", "return n - low", "return None"),
        ("swap_arithmetic", "return n - low", "return n + low"),
        ("break_loop", "continue", "break"),
        ("change_default", "strict=True", "strict=False"),
        ("swap_arguments", 'max(n, "ü" == value)', 'max("ü" == value, n)'),
        ("off_by_one", "value == 3", "value == 4"),
        ("wrong_name", "value < low", "value < strict"),
        ("remove_statement", "n += 1", "pass"),
    ],
)
def test_a_kind_changes_what_it_says(kind: str, old: str, new: str) -> None:
    changes = [lines_changed(m) for m in find_mutations(SOURCE, "pkg/c.py") if m.kind == kind]
    assert any(old in before and new in after for change in changes for before, after in change[:1])


def test_a_dropped_branch_leaves_the_rest_of_the_text() -> None:
    mutation = next(m for m in find_mutations(SOURCE, "pkg/c.py") if m.kind == "drop_branch")
    after = apply_mutation(SOURCE, mutation)
    assert "else:" not in after
    assert after == SOURCE.replace("\n            else:\n                values.append(value)", "")


def test_everything_outside_the_span_stays_and_the_result_compiles() -> None:
    data = SOURCE.encode()
    for mutation in find_mutations(SOURCE, "pkg/c.py"):
        after = apply_mutation(SOURCE, mutation)
        ast.parse(after)
        assert after.encode().startswith(data[: mutation.start])
        assert after.encode().endswith(data[mutation.end :])
        assert after != SOURCE


def test_docstrings_comments_and_module_level_stay() -> None:
    for mutation in find_mutations(SOURCE, "pkg/c.py"):
        after = apply_mutation(SOURCE, mutation)
        assert '"""Docstring: if x: return 1 + 1"""' in after
        assert "# ü: 1 < 2" in after
        assert "TOP = 1 + 2" in after
        assert mutation.function == "C.método"


def test_tests_are_never_touched() -> None:
    for path in ("tests/a.py", "pkg/test_a.py", "pkg/a_test.py", "conftest.py", "pkg/testing/x.py"):
        assert find_mutations(SOURCE, path) == []


def test_the_order_is_that_of_the_text_and_always_the_same() -> None:
    found = find_mutations(SOURCE, "pkg/c.py")
    assert found == find_mutations(SOURCE, "pkg/c.py")
    assert [m.start for m in found] == sorted(m.start for m in found)


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "1", "'ü'", "(a)"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" <  ", "==", " not  in ", " and ", " + ", "//", " is not "]), inner).map(
            "".join
        ),
        st.tuples(inner, inner).map(lambda pair: f"f({pair[0]},  {pair[1]})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=6,
)


@example("f(a==a,  a==(a))")
@given(EXPRESSIONS)
def test_any_expression_is_changed_into_one_that_parses(expression: str) -> None:
    source = f"def f(a, b):\n    é = 'x'; return {expression}\n"
    try:
        ast.parse(source)
    except SyntaxError:
        return
    for mutation in find_mutations(source, "m.py"):
        assert ast.dump(ast.parse(apply_mutation(source, mutation))) != ast.dump(ast.parse(source))
