"""Dockerfiles: what their lines mean."""

from __future__ import annotations

import pytest

from palaestra.core.errors import TaskError
from palaestra.suites.images.as_user import is_root
from palaestra.suites.images.dockerfile import expand, image_config, parse
from palaestra.suites.task_files import Unsupported

LONG = """\
# syntax=docker/dockerfile:1
FROM debian:bookworm AS base
ARG USER_NAME=ada GREETING
ENV A=1 B="two words" \\
    # a comment between
    C=${USER_NAME}-x

ENV OLD the rest of  it
WORKDIR /app
WORKDIR src/../lib
RUN apt-get update && \\
    apt-get install -y jq
RUN ["/bin/echo", "a b"]
COPY --chown=ada:ada --chmod=755 a.sh b.sh /app/
RUN <<EOF bash
echo one
  echo "$A"
EOF
COPY <<-'END' /app/note
\tplain $A
\tEND
USER ${USER_NAME}
CMD ["sleep", "infinity"]
"""


def test_all_forms_of_lines() -> None:
    lines = parse(LONG)
    assert [each.name for each in lines] == [
        "FROM", "ARG", "ENV", "ENV", "WORKDIR", "WORKDIR", "RUN", "RUN", "COPY", "RUN", "COPY", "USER", "CMD",
    ]  # fmt: skip
    update, echo, copy, script, note = lines[6], lines[7], lines[8], lines[9], lines[10]
    assert update.arguments.split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "jq"]
    assert echo.words() == ["/bin/echo", "a b"]
    assert copy.flags == {"chown": "ada:ada", "chmod": "755"}
    assert copy.words() == ["a.sh", "b.sh", "/app/"]
    assert script.heredocs[0].text == 'echo one\n  echo "$A"\n'
    assert (note.heredocs[0].text, note.heredocs[0].quoted) == ("plain $A\n", True)
    assert update.line == 11


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("[ -d /app ] || mkdir /app", None),
        ("[[ a == a ]]", None),
        ("a", None),
        ("[1]", None),
    ],
)
def test_the_exec_form(arguments: str, words: list[str] | None) -> None:
    (_, run) = parse(f"FROM x\nRUN {arguments}\n")
    assert run.exec_form == words


def test_how_commands_start() -> None:
    config = image_config(parse(LONG))
    assert config.env == {"A": "1", "B": "two words", "C": "ada-x", "OLD": "the rest of  it"}
    assert (config.workdir, config.user) == ("/app/lib", "ada")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("$A/${B}", "1/"), ("${B:-x}", "x"), ("${A:-x}", "1"), ("${A:+y}", "y"), ("${B:+y}", ""), ("a$", "a$")],
)
def test_references(text: str, wanted: str) -> None:
    assert expand(text, {"A": "1"}) == wanted


@pytest.mark.parametrize("user", ["", "root", "0", "0:0", "root:root"])
def test_root_by_any_name(user: str) -> None:
    assert is_root(image_config(parse(f"FROM x\nUSER {user}\n" if user else "FROM x\n")).user)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN true\n", "has no FROM"),
        ("FROM a\nENV =x\n", "line 2: '' cannot be an environment variable"),
        ("FROM a\nENV A=x\0y\n", "line 2: 'A' cannot be an environment variable"),
        ("FROM a\nRUN <<END\nx\n", "line 2: the here-document END is not closed"),
        ('FROM a\nENV A="x\n', "line 2: No closing quotation"),
    ],
)
def test_a_broken_file_names_its_line(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        image_config(parse(text))


def test_several_stages_need_a_builder() -> None:
    with pytest.raises(Unsupported, match="several stages, which need docker"):
        parse("FROM a AS one\nFROM b\nCOPY --from=one /x /x\n")
