"""Names of formats, dotted paths, and what an unknown one is answered with."""

from __future__ import annotations

import pytest

from palaestra.rollouts.export.formats import FORMATS, exporter_named
from palaestra.rollouts.export.openai import OpenAIExporter
from palaestra_slots.core.errors import ConfigError


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_leads_to_an_exporter_of_that_name(name: str) -> None:
    exporter = exporter_named(name)
    assert exporter.name == name
    assert exporter.ending.startswith(".")


def test_a_dotted_path_needs_no_line_in_the_table() -> None:
    assert isinstance(exporter_named("palaestra.rollouts.export.openai:OpenAIExporter"), OpenAIExporter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opnai", "Did you mean openai?"),
        ("", "--to"),
        ("no_such_module:Thing", "cannot load the export format no_such_module:Thing"),
        ("palaestra.rollouts.export.openai:Nothing", "has no attribute"),
    ],
)
def test_an_unknown_format_is_answered_with_the_way_out(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        exporter_named(name)
    assert message in str(raised.value)
