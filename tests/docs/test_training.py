"""The code in docs/training.md, executed: what it makes of exported rows has the shapes that the trainers document."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
from recorded import META, groups, sky

from palaestra.rollouts.export.formats import FORMATS, exporter_named
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")


def function(name: str) -> Callable[..., JSON]:
    """The function of that name from the page's code block that defines it."""
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"def {name}(" in code)
    names: dict[str, JSON] = {}
    exec(compile(block, "docs/training.md", "exec"), names)
    found: Callable[..., JSON] = names[name]
    return found


def exported(format_name: str, *exported_groups: Group) -> bytes:
    out = io.BytesIO()
    exporter_named(format_name).export(exported_groups or groups(), out, replace(META))
    return out.getvalue()


def rows(*indices: int) -> list[dict[str, JSON]]:
    found = [json.loads(line) for line in exported("rows").splitlines()]
    return [row for row in found if row["index"] in (indices or range(9))]


@pytest.fixture
def tinker(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tinker itself where it is installed; elsewhere its two types with the fields that it documents."""
    if importlib.util.find_spec("tinker") is not None:
        return True
    stand_in = ModuleType("tinker")
    for each in (Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan):
        setattr(stand_in, each.__name__, each)
    monkeypatch.setitem(sys.modules, "tinker", stand_in)
    return False


@dataclass(frozen=True)
class ModelInput:
    ints: list[int]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(tokens)

    def to_ints(self) -> list[int]:
        return self.ints


@dataclass(frozen=True)
class PromptProvenanceSpan:
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True)
class SampledProvenanceSpan(PromptProvenanceSpan):
    pass


@dataclass(frozen=True)
class Datum:
    """`importance_sampling` wants these inputs and no others."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, list[float]]
    model_input_spans: Sequence[PromptProvenanceSpan | SampledProvenanceSpan] = ()
    loss_fn_input_spans: Sequence[PromptProvenanceSpan | SampledProvenanceSpan] = ()

    def with_provenance(self, model_input: JSON, loss_fn_inputs: JSON) -> Datum:
        assert sum(span.length for span in model_input) == len(self.model_input.ints)
        assert sum(span.length for span in loss_fn_inputs) == len(self.loss_fn_inputs["target_tokens"])
        return replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)

    def __post_init__(self) -> None:
        assert set(self.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}


@pytest.mark.filterwarnings("ignore")  # those of the package, where it is installed
def test_a_datum_is_shifted_by_one_and_moves_sampled_tokens_only(tinker: bool) -> None:
    exported_rows = rows()
    make, mean = function("datum"), 0.5
    for row in exported_rows:
        datum = make(row, mean)
        inputs = {name: plain(values) for name, values in datum.loss_fn_inputs.items()}
        tokens = row["prompt_ids"] + row["completion_ids"]
        assert datum.model_input.to_ints() == tokens[:-1]
        assert inputs["target_tokens"] == tokens[1:]
        assert len(inputs["logprobs"]) == len(inputs["advantages"]) == len(tokens) - 1
        trained = [0] * (len(row["prompt_ids"]) - 1) + row["mask"]
        assert inputs["advantages"] == pytest.approx([(row["reward"] - mean) * on for on in trained])
        sampled = [logprob for logprob, on in zip(inputs["logprobs"], trained, strict=True) if on]
        assert sampled == [logprob for logprob, on in zip(row["logprobs"], row["mask"], strict=True) if on]


def plain(values: JSON) -> Sequence[float]:
    """A list, also where Tinker made an array of it."""
    return values if isinstance(values, list) else list(values.tolist())


@pytest.mark.filterwarnings("ignore")  # those of the package, where it is installed
def test_provenance_covers_inputs_and_targets(tinker: bool) -> None:
    for row in rows(0, 1):
        datum = function("with_provenance")(function("datum")(row, 0.5), row)
        (first, *_, last), targets = datum.model_input_spans, datum.loss_fn_input_spans
        assert (first.sequence_id, first.offset) == (f"{row['rollout_id']}:{row['segment'] + 1}", 0)
        assert sum(span.length for span in targets) == sum(span.length for span in datum.model_input_spans)
        assert targets[-1].length == last.length + 1
        assert (targets[0].offset, targets[0].length) == (1, first.length - 1)


def test_baselines_are_over_rollouts_and_not_over_segments() -> None:
    assert len(rows(0, 1)) == 3
    assert function("baselines")(rows(0, 1)) == {"000000-sky": (1.0 + 0.25) / 2}


def test_only_good_rollouts_are_kept_for_fine_tuning(tmp_path: Path) -> None:
    path = tmp_path / "openai.jsonl"
    path.write_bytes(exported("openai"))
    kept = function("kept")
    assert [row.keys() for row in kept(path)] == [{"messages", "tools"}]
    assert len(kept(path, at_least=0.0)) == 3
    assert json.loads(kept(path)[0]["tools"]) == sky().tools


def test_pairs_prefer_the_rollout_with_the_higher_reward(tmp_path: Path) -> None:
    path = tmp_path / "openai.jsonl"
    lines = [json.loads(line) for line in exported("openai").splitlines()]
    good, bad = lines[0], lines[1] | {"messages": lines[0]["messages"][:-1]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (bad, good, lines[2] | {"task_id": "sea"})))
    (pair,) = function("pairs")(path)
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    assert pair["prompt"] + pair["chosen"] == good["messages"]
    assert pair["prompt"] + pair["rejected"] == bad["messages"]


def test_the_page_names_every_format_and_every_key_of_a_row() -> None:
    assert {name for name in FORMATS if f"`{name}`" not in PAGE} == set()
    explained = {"schema", "index", "outcome", "reason", "finish_reason", "source"}
    assert {name for name in ExportedRow.__struct_fields__ if f"`{name}`" not in PAGE} == explained


def test_each_recipe_is_ten_lines() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        assert len(list(filter(None, block.splitlines()))) <= 10
