"""Tasks about git repositories. The slot's image must have git.

Each function that returns a `TaskPart` builds one kind of task; its docstring describes the work that the task asks
for.
"""

from __future__ import annotations

from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.checks.file_checks import Absent, Exists, FileContent, Lines
from palaestra_suites.endless_terminals.checks.program_checks import Git
from palaestra_suites.endless_terminals.family import Build, DataFile, Family, TaskPart
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.words import PEOPLE

_NEEDS = ("git",)

_IDENTITY = (
    "export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=Setup GIT_AUTHOR_EMAIL=setup@example.org "
    "GIT_COMMITTER_NAME=Setup GIT_COMMITTER_EMAIL=setup@example.org "
    "GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'\n"
)
"""Shell commands that set the author, the committer and the dates in set-ups and solutions, so that commits have the
same hashes on every machine."""

_TOLD = "Where git wants an identity, any will do."


def _begun(folder: str) -> str:
    """Return a shell script that creates an empty repository with the branch main and enters its folder."""
    return f"{_IDENTITY}mkdir -p {folder}\ncd {folder}\ngit init -q -b main .\n"


def _commit(name: str, text: str, message: str) -> str:
    """Return a shell script that writes a file and commits everything."""
    return (
        f"mkdir -p \"$(dirname {name})\"\ncat > {name} <<'TEXT'\n{text}TEXT\ngit add -A\ngit commit -q -m '{message}'\n"
    )


def _solved(folder: str, shell: str) -> str:
    return f"{_IDENTITY}cd {folder}\n{shell}"


def committed(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Create a repository with a given author, message and ignored files."""
    folder = f"{place}/project"
    kept = {f"{word}.txt": draw.prose(2) for word in draw.words(3)}
    junk = {f"{word}.o": "object\n" for word in draw.words(2)}
    person, message = draw.pick(PEOPLE), f"Add {draw.sentence(shortest=2, longest=4)}"
    mail = f"{person.lower()}@example.org"
    ask = (
        f"Make `{folder}` a git repository whose only branch is `main`, and commit its `.txt` files in one commit "
        "with the "
        f"message `{message}` and the author `{person} <{mail}>`. A `.gitignore`, in the same commit, keeps files "
        "that end in "
        "`.o` out; `git status` must show nothing to commit afterwards."
    )
    solution = _solved(
        folder,
        "git init -q -b main .\necho '*.o' > .gitignore\ngit add -A\n"
        f"git commit -q -m '{message}' --author='{person} <{mail}>'\n",
    )
    checks = (
        Git(folder, ["log", "--all", "--format=%an <%ae>: %s"], f"{person} <{mail}>: {message}"),
        Git(folder, ["for-each-ref", "--format=%(refname)", "refs/heads"], "refs/heads/main"),
        Git(folder, ["ls-tree", "-r", "--name-only", "main"], "\n".join(sorted([".gitignore", *kept])), False),
        Git(folder, ["status", "--porcelain"], ""),
        Git(folder, ["check-ignore", *sorted(junk)], "\n".join(sorted(junk))),
    )
    return TaskPart(ask, solution, checks, {f"{folder}/{name}": text for name, text in {**kept, **junk}.items()})


def merged(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Merge two branches that changed different files."""
    folder = f"{place}/repo"
    a, b, c, branch = draw.words(4)
    texts = {name: draw.prose(2) for name in (f"{a}.txt", f"{b}.txt", f"{c}.txt")}
    changed = f"{texts[f'{a}.txt']}{draw.sentence()}\n"
    setup = (
        _begun(folder)
        + _commit(f"{a}.txt", texts[f"{a}.txt"], "First")
        + f"git checkout -q -b {branch}\n"
        + _commit(f"{b}.txt", texts[f"{b}.txt"], "Second")
        + "git checkout -q main\n"
        + _commit(f"{a}.txt", changed, "Third")
        + _commit(f"{c}.txt", texts[f"{c}.txt"], "Fourth")
    )
    ask = (
        f"In the repository `{folder}` merge the branch `{branch}` into `main` with a merge commit (two parents, "
        "whatever its "
        f"message) and delete `{branch}`. `main` is checked out afterwards, with nothing left to commit. {_TOLD}"
    )
    solution = _solved(
        folder, f"git checkout -q main\ngit merge -q --no-ff --no-edit {branch}\ngit branch -q -d {branch}\n"
    )
    names = sorted(texts)
    checks: tuple[AnyCheck, ...] = (
        Git(folder, ["for-each-ref", "--format=%(refname)", "refs/heads"], "refs/heads/main"),
        Git(folder, ["symbolic-ref", "HEAD"], "refs/heads/main"),
        Git(folder, ["log", "--format=%s", "--no-merges", "main"], "First\nSecond\nThird\nFourth", False),
        Git(folder, ["rev-list", "--count", "--merges", "main"], "1"),
        Git(folder, ["ls-tree", "-r", "--name-only", "main"], "\n".join(names)),
        Git(folder, ["status", "--porcelain"], ""),
        FileContent(f"{folder}/{a}.txt", changed),
        FileContent(f"{folder}/{b}.txt", texts[f"{b}.txt"]),
    )
    initial = (
        Git(folder, ["rev-list", "--count", "--merges", "main"], "0"),
        Git(folder, ["rev-list", "--count", branch], "2"),
        Exists(f"{folder}/{a}.txt"),
        Absent(f"{folder}/{b}.txt"),
    )
    return TaskPart(ask, solution, checks, setup=setup, initial=initial)


def tagged(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Tag the commit that added a line."""
    folder = f"{place}/repo"
    count, guilty = draw.between(6, 10), draw.between(2, 5)
    word, name, tag, others = draw.fresh(), f"{draw.fresh()}.txt", f"found-{draw.fresh()}", draw.words(9)
    lines: list[str] = []
    setup = _begun(folder)
    for number in range(1, count + 1):
        lines.append(f"{draw.sentence(others)} {word}" if number == guilty else draw.sentence(others))
        setup += _commit(name, "".join(f"{line}\n" for line in lines), f"Change {number}")
    ask = (
        f"In the repository `{folder}` some commit brought a line with the word `{word}` into `{name}`. Put the tag "
        f"`{tag}` on "
        "that commit (light or annotated). Branches and files stay as they are."
    )
    solution = _solved(folder, f"git tag {tag} $(git log --format=%H -S {word} -- {name} | tail -n 1)\n")
    checks = (
        Git(folder, ["log", "-1", "--format=%s", tag], f"Change {guilty}"),
        Git(folder, ["log", "--format=%s", "main"], "\n".join(f"Change {n}" for n in range(count, 0, -1))),
        Git(folder, ["status", "--porcelain"], ""),
    )
    initial = (Git(folder, ["tag"], ""),)
    return TaskPart(ask, solution, checks, setup=setup, initial=initial)


def restored(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Restore a file that a commit deleted."""
    folder = f"{place}/repo"
    name, other = f"{draw.fresh()}.txt", f"{draw.fresh()}.txt"
    last, message = draw.prose(4), f"Restore {draw.fresh()}"
    setup = (
        _begun(folder)
        + _commit(name, draw.prose(3), "Add the file")
        + _commit(name, last, "Change the file")
        + f"git rm -q {name}\n"
        + _commit(other, draw.prose(2), "Tidy up")
        + _commit(other, draw.prose(3), "Go on")
    )
    ask = (
        f"The file `{name}` of the repository `{folder}` was deleted by a commit. Bring it back with the content that "
        "it had "
        f"last, and commit that to `main` as one new commit with the message `{message}`. {_TOLD}"
    )
    solution = _solved(
        folder,
        f"c=$(git log --diff-filter=D --format=%H -1 -- {name})\ngit checkout -q $c^ -- {name}\n"
        f"git commit -q -m '{message}'\n",
    )
    checks = (
        FileContent(f"{folder}/{name}", last),
        Git(folder, ["show", f"main:{name}"], last),
        Git(folder, ["log", "--format=%s", "main"], f"{message}\nGo on\nTidy up\nChange the file\nAdd the file"),
        Git(folder, ["status", "--porcelain"], ""),
    )
    initial = (Absent(f"{folder}/{name}"), Git(folder, ["rev-list", "--count", "main"], "4"))
    return TaskPart(ask, solution, checks, setup=setup, initial=initial)


def authored(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Count the commits of each author."""
    folder, target = f"{place}/repo", f"{place}/{draw.fresh()}.txt"
    people = draw.sample(PEOPLE, 4)
    counts = dict(zip(people, draw.sample(range(1, 7), 4), strict=True))
    setup = _begun(folder)
    for number, person in enumerate(draw.shuffled([p for p in people for _ in range(counts[p])])):
        setup += (
            f"echo {number} >> log.txt\ngit add -A\n"
            f"git commit -q -m 'Change {number}' --author='{person} <{person.lower()}@example.org>'\n"
        )
    found = [f"{counts[person]} {person}" for person in sorted(people, key=lambda person: -counts[person])]
    ask = (
        f"Count the commits of each author on `main` of the repository `{folder}` and write `{target}`: one line "
        "`COUNT NAME` "
        "for each author's name, most commits first."
    )
    solution = (
        f"git -c safe.directory='*' -C {folder} log --format=%an main | sort | uniq -c | sort -nr | "
        f"awk '{{print $1, $2}}' > {target}\n"
    )
    output = DataFile(target, "lines", lines=tuple(found))
    initial = (Git(folder, ["rev-list", "--count", "main"], str(sum(counts.values()))),)
    return TaskPart(ask, solution, (Lines(target, found),), setup=setup, initial=initial, output=output)


def untracked(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Stop tracking files without deleting them."""
    folder, message = f"{place}/repo", f"Ignore {draw.fresh()}"
    kept, secret, cache = f"{draw.fresh()}.txt", f"{draw.fresh()}.env", f"cache/{draw.fresh()}.bin"
    setup = (
        _begun(folder)
        + f"mkdir cache\necho secret > {secret}\necho x > {cache}\n"
        + _commit(kept, draw.prose(2), "All")
    )
    ask = (
        f"The repository `{folder}` tracks `{secret}` and the directory `cache`, which it should not. Stop tracking "
        "both "
        "without deleting them from disk, add a `.gitignore` that ignores them, and commit all this to `main` as one "
        "commit "
        f"with the message `{message}`. {_TOLD}"
    )
    solution = _solved(
        folder,
        f"git rm -rq --cached {secret} cache\nprintf '%s\\n' {secret} cache/ > .gitignore\ngit add .gitignore\n"
        f"git commit -q -m '{message}'\n",
    )
    checks = (
        Git(folder, ["ls-tree", "-r", "--name-only", "main"], f".gitignore\n{kept}", False),
        Git(folder, ["log", "--format=%s", "main"], f"{message}\nAll"),
        Git(folder, ["status", "--porcelain"], ""),
        FileContent(f"{folder}/{secret}", "secret"),
        FileContent(f"{folder}/{cache}", "x"),
    )
    tracked = Git(folder, ["ls-files"], f"{cache}\n{kept}\n{secret}", False)
    initial = (tracked, Exists(f"{folder}/{secret}"), Exists(f"{folder}/{cache}"))
    return TaskPart(ask, solution, checks, setup=setup, initial=initial)


def _family(name: str, build: Build) -> Family:
    return Family(name, build, needs=_NEEDS)


FAMILIES = (
    _family("git-commit", committed),
    _family("git-merge", merged),
    _family("git-tag", tagged),
    _family("git-restore", restored),
    _family("git-authors", authored),
    _family("git-untrack", untracked),
)
