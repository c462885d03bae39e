"""More than a thousand outputs in every form are read as their writer meant them."""

from __future__ import annotations

import pytest

from corpus import TOOLS, Case, cases
from forms import FORMS, Form
from palaestra_tokens.parsers import ParsedOutput, get_parser, list_parsers


def by_id(form: Form) -> str:
    return form.id


def unlike(case: Case, parsed: ParsedOutput) -> str | None:
    """What is not as it was meant, or None."""
    calls = [(call.name, call.arguments) for call in parsed.calls]
    if calls != list(case.calls):
        return f"calls {calls!r:.600} instead of {case.calls!r:.600}"
    if len(parsed.errors) != case.errors:
        return f"{len(parsed.errors)} errors instead of {case.errors}: {parsed.errors!r:.600}"
    if case.reason is not None and {error.reason for error in parsed.errors} != {case.reason}:
        return f"{[error.reason for error in parsed.errors]} instead of {case.reason}"
    content = "…".join(text.text.strip() for text in parsed.texts)
    if content != case.content:
        return f"content {content!r:.300} instead of {case.content!r:.300}"
    if (parsed.reasoning or "") != case.reasoning:
        return f"reasoning {parsed.reasoning!r:.300} instead of {case.reasoning!r:.300}"
    return None


def report(wrong: list[tuple[Case, str]]) -> str:
    return "\n".join(f"{case.id}: {why}\n    {case.text!r:.500}" for case, why in wrong)


@pytest.mark.parametrize("form", FORMS, ids=by_id)
def test_every_case_is_read_as_it_was_meant(form: Form) -> None:
    parser = get_parser(form.format)
    wrong = []
    for case in cases(form):
        why = unlike(case, parser.parse(case.text, tools=TOOLS, cut=case.cut, thinking=case.thinking))
        if why is not None:
            wrong.append((case, why))
    assert not wrong, report(wrong)


def test_an_output_of_gpt_oss_may_begin_with_the_recipient() -> None:
    """`<|start|>assistant` is the end of the prompt then."""
    parser, began = get_parser("gpt_oss"), "<|start|>assistant"
    (form,) = (form for form in FORMS if form.id == "gpt-oss recipient first")
    read = 0
    for case in cases(form):
        text = case.text.removeprefix(began)
        if text == case.text or not text.strip():
            continue
        read += 1
        parsed = parser.parse(text, tools=TOOLS, cut=case.cut)
        assert unlike(case, parsed) is None, case.id
    assert read > 100


def test_there_are_more_than_a_thousand_cases_and_none_for_no_format() -> None:
    assert sum(1 for form in FORMS for _ in cases(form)) > 1000
    missing = set(list_parsers()) - {form.format for form in FORMS}
    assert missing <= {"deepseek_v31", "deepseek_v32"}  # other names for formats that are there
