"""Dockerfiles: what their lines mean."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import TaskError
from palaestra_slots.images.as_user import is_root
from palaestra_slots.images.dockerfile import (
    ImageRecipe,
    base_name,
    check_images,
    expand,
    image_config,
    needed,
    parse,
    parse_recipe,
)
from palaestra_slots.images.task_files import Unsupported

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
    lines = parse(LONG)[-1].instructions
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
    (_, run) = parse(f"FROM x\nRUN {arguments}\n")[-1].instructions
    assert run.exec_form == words


def test_how_commands_start() -> None:
    config = image_config(parse(LONG)[-1].instructions)
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
    assert is_root(image_config(parse(f"FROM x\nUSER {user}\n" if user else "FROM x\n")[-1].instructions).user)


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
        image_config(parse(text)[-1].instructions)


STAGES = """\
ARG IMAGE=debian
FROM ${IMAGE} AS Base
ENV A=1
WORKDIR /base
FROM $IMAGE AS unused
COPY --from=nowhere /x /x
FROM base AS made
ENV B=$A
FROM base
COPY --from=made /x /x
COPY --from=0 /y /y
ENV C=$A$B
"""


def test_what_leads_to_each_stage() -> None:
    stages = parse(STAGES)
    assert [each.name for each in stages] == ["base", "unused", "made", "3"]
    config = image_config(stages[-1].instructions)
    assert (config.env, config.workdir) == ({"A": "1", "C": "1"}, "/base"), "what `made` sets is not seen"
    assert image_config(stages[2].instructions).env == {"A": "1", "B": "1"}
    assert [number for number, _ in needed(stages)] == [0, 2]
    assert base_name(stages) == "debian"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("FROM a\nCOPY --from=ghcr.io/tool /x /x\n", Unsupported, r"another image \(line 2\)"),
        ("FROM a AS b\nCOPY --from=b /x /x\n", TaskError, "line 2: it copies from a stage that comes later"),
        ("FROM a AS b\nFROM c\nCOPY --from=b /x /x\n", Unsupported, "stages over c and a"),
        ("FROM a AS n0\n" + "".join(f"FROM n{n} AS n{n + 1}\n" for n in range(3_000)), TaskError, "more than 2000"),
    ],
)
def test_stages_that_cannot_be_built(text: str, error: type[TaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        base_name(parse(text))


def test_the_stage_that_a_recipe_names_is_the_last(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(STAGES)
    recipe = ImageRecipe(tmp_path, tmp_path / "Dockerfile", target="MADE")
    assert [each.name for each in parse_recipe(recipe)] == ["base", "unused", "made"]
    with pytest.raises(TaskError, match="no stage 'none'"):
        parse_recipe(replace(recipe, target="none"))


HERE_DOCUMENTS = {
    # What follows RUN, and the names of the documents that BuildKit sees.
    "cat <<EOF": ["EOF"],
    "cat <<EOF > /x": ["EOF"],
    "<<-EOF": ["EOF"],
    '<<"EOF"': ["EOF"],
    "<<-'EOF'": ["EOF"],
    "<<E'O'F": ["EOF"],
    "<<\\EOF": ["EOF"],
    '<<"two words"': ["two words"],
    "<<end.of-file": ["end.of-file"],
    "3<<EOF cat": ["EOF"],
    "cat 1<<2": ["2"],
    "cat <<A <<-B 4<<C": ["A", "B", "C"],
    "cat \\\n  # a comment\n\n  <<EOF": ["EOF"],
    "--mount=type=cache,target=/x cat <<EOF": ["EOF"],
    "cat <<<EOF": [],
    "cat <<< EOF": [],
    "cat << EOF": [],
    "cat<<EOF": [],
    'echo "<<x"': [],
    "echo '<<x'": [],
    "echo 'a <<x b'": [],
    'echo "a \\" <<x"': [],
    "echo \\<<x": [],
    "echo a\\ <<x": [],
    "echo $((1<<20))": [],
    "echo $(( 1 << 20 ))": [],
    "echo a<<x": [],
    '["echo", "<<x"]': [],
    "echo it's <<x": [],
    "echo x # <<EOF'": [],
}


@pytest.mark.parametrize(("command", "names"), HERE_DOCUMENTS.items())
@pytest.mark.parametrize("before", ["RUN ", "run\t", "ONBUILD RUN "])
def test_what_begins_a_here_document(before: str, command: str, names: list[str]) -> None:
    chomped = re.findall(r"<<-'?(\w+)", command)
    ends = [f"\t{name}" if name in chomped else f"\t{name}\n{name}" for name in names]
    documents = "".join(f"FROM hidden\n{end}\n" for end in ends)
    read = parse(f"FROM a\n{before}{command}\n{documents}USER me\n")
    assert [each.name for stage in read for each in stage.instructions] == ["FROM", before.split()[0].upper(), "USER"]
    assert [document.name for document in read[0].instructions[1].heredocs] == names


@pytest.mark.parametrize("name", ["ENV A=<<x", "CMD cat <<x", "LABEL a=b <<x", "ENTRYPOINT cat <<x", "# <<x"])
def test_only_instructions_that_copy_or_run_have_here_documents(name: str) -> None:
    assert [each.name for each in parse(f"FROM a\n{name}\nUSER me\n")[0].instructions][-1] == "USER"


def test_lines_end_where_tools_end_them() -> None:
    text = "\ufeffFROM a\r\nRUN true \\ \r\n  && false\r\nRUN echo \x0cb\\\\\nUSER me\n"
    assert [each.name for each in parse(text)[0].instructions] == ["FROM", "RUN", "RUN", "USER"]
    parse("# escape=\\\nFROM a\n")
    with raises(Unsupported):
        parse("# syntax=docker/dockerfile:1\n#Escape = `\nFROM a\n")


HIDDEN = "FROM docker-archive:/srv/secret.tar\nRUN true \\\nx\n"


@pytest.mark.parametrize(
    "text",
    [
        'RUN echo "<<x"\n' + HIDDEN,
        "RUN echo '<<x' \\\n  done\n" + HIDDEN,
        "RUN echo $((1<<x))\n" + HIDDEN,
        "RUN echo \\<<x\n" + HIDDEN,
        "RUN echo a<<x\n" + HIDDEN,
        "ENV A=<<x\n" + HIDDEN,
        "RUN cat <<x\n" + HIDDEN,  # a here-document, but not for buildah before 1.33
        "RUN cat <<x\nCOPY --from=docker-archive:/x /a /a\nRUN true \\\nx\n",
        "RUN cat <<x\nARG A=docker-archive:/x\nRUN true \\\nx\n",
        "RUN cat <<x\nFROM $A\nRUN true \\\nx\n",
        "RUN true \\\\\nFROM docker-archive:/x\n",
        "RUN true \\\x0c\nFROM docker-archive:/x\n",
        "RUN true \\\n\x1c#\nFROM docker-archive:/x\n",
        "RUN echo ${} <<x\n" + HIDDEN,
        "ONBUILD COPY --from=docker-archive:/x /a /a\n",
        "ONBUILD RUN --mount=type=bind,from=oci:/x,target=/y true\n",
        "COPY --fr\\om=docker-archive:/x /a /a\n",
        "COPY --'from'=docker-archive:/x /a /a\n",
        'COPY --chown="a b" --from="docker-archive:/x" /a /a\n',
        "FROM docker-archive:secret.tar\n",
        "FROM dir:images\n",
    ],
)
def test_no_line_hides_a_file_of_this_machine(text: str) -> None:
    with pytest.raises(TaskError):
        check_images(f"FROM debian:12\n{text}")


@pytest.mark.parametrize(
    "text",
    [
        "RUN echo $((1<<20)) $(( 1 << 20 ))\n",
        'RUN printf "<<EOF" && grep -c "<<" /etc/fstab; test 1 -lt 2\n',
        "RUN <<EOF\nfrom __future__ import annotations\nselect a FROM (b);\nFROM users;\ncurl --data '{\nEOF\n",
        "RUN cat <<'EOF' > /x.tex\nA & B \\\\\nC \\\nEOF\n",
        "RUN skopeo inspect docker-archive:/x.tar <<< y\n",
        'RUN --mount=type=secret,id="a b" --mount=type=bind,from=python:3.13,target="/x" true\n',
        "RUN cat <<EOF > ${HOME:-/root}/x\n$A ${B%.txt}\nEOF\n",
        "FROM docker:24-dind\nRUN true\n",
        "RUN true \\ \n\n  # a comment\n  && true\n",
    ],
)
def test_honest_lines_pass_the_check(text: str) -> None:
    check_images(f"# escape=\\\nFROM debian:12\n{text}")
