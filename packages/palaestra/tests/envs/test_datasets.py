"""Data sets in every shape: the same rows, one message for each bad one, columns under other names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from golden_messages import check_message, raises
from palaestra.envs.datasets import Row, read_rows
from palaestra_slots.core.errors import ConfigError, TaskError

ROWS: list[Row] = [{"id": "a", "question": "Where, and\nwhen?"}, {"id": "b", "question": 'the "other" one'}]


def written(folder: Path, ending: str) -> Path:
    path = folder / f"data.{ending}"
    match ending:
        case "parquet":
            parquet.write_table(arrow.Table.from_pylist(list(map(dict, ROWS))), path)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            path.write_text('\ufeffid,question\r\na,"Where, and\nwhen?"\r\nb,"the ""other"" one"\r\n')
        case _:
            path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    assert list(read_rows(written(tmp_path, ending))) == list(enumerate(ROWS, 1))


def test_a_folder_is_read_in_the_order_of_its_names_and_by_split(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name}) + "\n")
    assert [row for _, row in read_rows(tmp_path)] == [{"id": "a"}, {"id": "b"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/test-00000.jsonl").write_text('{"id": "held"}\n')
    assert list(read_rows(tmp_path, split="test")) == [(1, {"id": "held"})]


def test_columns_under_other_names(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    with path.open("a") as lines:
        lines.write('{"id": "c", "quest": "x"}\n')
    found = [row for _, row in read_rows(path, fields={"prompt": "question"})]
    assert found[0] == {**ROWS[0], "prompt": ROWS[0]["question"]}
    check_message(str(found[2]), "question", "prompt", "quest", "id")


@pytest.mark.parametrize(
    ("name", "text", "messages"),
    [
        ("t.jsonl", '{"id": 1}\n{torn\n[1]\n{"id": 2}\n', ["not JSON: Expecting property name", "not an object: list"]),
        ("t.jsonl", f'{{"id": 1}}\n{"[" * 100_000}\n{{"id": 2}}\n', ["not JSON: maximum recursion depth"]),
        ("t.json", '[{"id": 1}, 3, {"id": 2}]', ["not an object: int"]),
        ("t.csv", "id,x\n1,2\n1\n1,2,3\n3,4\n", ["line 3 of t.csv does not have the 2 fields", "line 4 of t.csv"]),
    ],
)
def test_a_bad_row_is_an_error_and_the_rest_goes_on(tmp_path: Path, name: str, text: str, messages: list[str]) -> None:
    (tmp_path / name).write_text(text)
    found = [row for _, row in read_rows(tmp_path / name)]
    errors = [row for row in found if isinstance(row, TaskError)]
    assert len(found) - len(errors) == 2
    assert [message in str(error) for message, error in zip(messages, errors, strict=True)] == [True] * len(messages)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.jsonl", None, "there is no data set .*absent.jsonl"),
        ("t.json", "{}", "t.json must hold a list of rows"),
        ("t.json", "[", "t.json is not JSON"),
        ("t.json", "[" * 100_000, "t.json is not JSON: maximum recursion depth"),
        ("t.json", '{"id": 1}\n{"id": 2}\n', "not JSON: Extra data.*rename the file to .jsonl"),
        ("t.txt", "a prompt\nanother\n", "t.txt is not JSONL"),
        ("t.csv", "id,x,id\n1,2,3\n", "several columns called 'id'"),
        ("t.parquet", "no", "t.parquet is not a readable Parquet file"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_message(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_byte_order_mark_belongs_to_no_row(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, ending)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(read_rows(path)) == list(enumerate(ROWS, 1))


def test_a_row_that_is_not_utf8_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes('{"id": "é"}\n'.encode("latin-1") + '{"id": "é"}\n'.encode())
    bad, good = [row for _, row in read_rows(path)]
    assert isinstance(bad, TaskError)
    assert "not UTF-8" in str(bad)
    assert good == {"id": "é"}


def test_an_empty_folder_is_one_message(tmp_path: Path) -> None:
    with raises(ConfigError):
        list(read_rows(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the extra `hub` is here")
def test_a_hub_name_without_the_extra_names_it() -> None:
    with pytest.raises(ConfigError, match=r"'owner/name'.*\[hub\]"):
        list(read_rows("owner/name"))


@pytest.mark.parametrize("attack", ["long values", "a repeated value"])
def test_a_small_parquet_file_does_not_unpack_to_many_gigabytes(tmp_path: Path, attack: str) -> None:
    path = tmp_path / "t.parquet"
    if attack == "long values":
        table = arrow.table({"id": ["x" * (64 << 20)]})
        with parquet.ParquetWriter(path, table.schema, compression="zstd", write_statistics=False) as writer:
            for _ in range(17):  # row groups
                writer.write_table(table)
    else:
        numbers = arrow.array([0] * 100_000, arrow.int32())
        values = arrow.DictionaryArray.from_arrays(numbers, ["x" * (1 << 20)])
        parquet.write_table(arrow.table({"id": values}), path, compression="zstd")
    assert path.stat().st_size < 1 << 18
    read: list[int] = []
    with pytest.raises(ConfigError, match="unpacks to more than 1024 MiB"):
        read.extend(number for number, _ in read_rows(path))
    assert len(read) == (0 if attack == "long values" else 1023)
