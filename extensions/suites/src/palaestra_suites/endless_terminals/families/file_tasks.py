"""Tasks about files, permissions and archives.

Each function that returns a `TaskPart` builds one kind of task; its docstring, if any, describes the work that the task
asks for.
"""

from __future__ import annotations

import shlex

from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck
from palaestra_suites.endless_terminals.checks.file_checks import (
    Absent,
    Digests,
    Exists,
    FileContent,
    Files,
    Lines,
    Modes,
    SymbolicLink,
)
from palaestra_suites.endless_terminals.checks.program_checks import Archive
from palaestra_suites.endless_terminals.family import DataFile, DataKind, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw

_ENDINGS = ("txt", "md", "csv", "log", "cfg")


def _tree(draw: Draw, folder: str, count: int) -> dict[str, str]:
    """Return the texts of files with various extensions, some in subdirectories, keyed by their path below `folder`."""
    places = ["", "", f"{draw.fresh()}/", f"{draw.fresh()}/{draw.fresh()}/"]
    return {
        f"{draw.pick(places)}{word}.{draw.pick(_ENDINGS)}": draw.prose(draw.between(1, 4)) for word in draw.words(count)
    }


def _under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def renamed(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Rename files to one naming style."""
    folder = f"{place}/{draw.fresh()}"
    ending = draw.pick(_ENDINGS)
    words = draw.words(12)
    old = {f"{a.title()} {b.upper()}.{ending}": draw.prose(1) for a, b in zip(words[:6], words[6:], strict=True)}
    new = {name.lower().replace(" ", "_"): text for name, text in old.items()}
    ask = (
        f"Rename every file in `{folder}`: capitals become small letters and each blank becomes an underscore. The "
        "texts stay "
        "as they are."
    )
    solution = f'cd {folder}\nfor f in *; do mv -n -- "$f" "$(printf %s "$f" | tr \'A-Z \' \'a-z_\')"; done\n'
    return TaskPart(ask, solution, (Files(folder, {**new}),), _under(folder, old))


def by_ending(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    folder, target = f"{place}/inbox", f"{place}/sorted"
    files = _tree(draw, folder, draw.between(7, 12))
    moved = {f"{name.rpartition('.')[2]}/{name.rpartition('/')[2]}": text for name, text in files.items()}
    ask = (
        f"Move every file below `{folder}` (at any depth) to `{target}/ENDING/`, where ENDING is what follows the "
        "last dot of "
        f"its name; the file keeps its name. Afterwards `{folder}` may hold no file (empty directories may stay)."
    )
    solution = (
        f'find {folder} -type f | while read -r f; do d={target}/${{f##*.}}; mkdir -p "$d"; mv "$f" "$d/"; done\n'
        f"mkdir -p {folder}\n"
    )
    gone = tuple(Absent(f"{folder}/{name}") for name in files)
    return TaskPart(ask, solution, (Files(target, {**moved}), *gone), _under(folder, files))


def duplicates(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    folder = f"{place}/{draw.fresh()}"
    texts = [draw.prose(3) for _ in range(4)]
    names = sorted(f"{word}.txt" for word in draw.words(9))
    files = {name: texts[number % 4] for number, name in enumerate(draw.shuffled(names))}
    kept: dict[str, str] = {}
    for name in names:
        if files[name] not in kept.values():
            kept[name] = files[name]
    ask = (
        f"Some files in `{folder}` have the same content. Of each set of equal files keep the one whose name comes "
        "first in "
        "byte order and delete the others."
    )
    solution = (
        f"cd {folder}\nexport LC_ALL=C\nsha256sum * | sort -k2 | awk 'seen[$1]++ {{print $2}}' | xargs -r rm --\n"
    )
    return TaskPart(ask, solution, (Files(folder, {**kept}),), _under(folder, files))


def pruned(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    folder = f"{place}/{draw.fresh()}"
    files = _tree(draw, folder, 8)
    junk = {f"{word}{ending}": "x\n" for word, ending in zip(draw.words(4), (".tmp", ".bak", "~", ".tmp"), strict=True)}
    deep = {f"{name.rpartition('/')[0]}/{draw.fresh()}.bak".lstrip("/"): "y\n" for name in list(files)[:2]}
    ask = (
        f"Below `{folder}`, at any depth, delete the files whose names end in `.tmp`, `.bak` or `~`. Every other file "
        "stays as "
        "it is."
    )
    solution = f"find {folder} -type f \\( -name '*.tmp' -o -name '*.bak' -o -name '*~' \\) -delete\n"
    return TaskPart(ask, solution, (Files(folder, {**files}),), _under(folder, {**files, **junk, **deep}))


def largest(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    folder, count = f"{place}/{draw.fresh()}", draw.between(2, 4)
    sizes = draw.sample(range(50, 3000), 9)
    names = [f"{draw.pick(['', 'deep/', 'deep/er/'])}{word}.bin" for word in draw.words(9)]
    files = {name: "x" * size for name, size in zip(names, sizes, strict=True)}
    ranked = sorted(zip(sizes, names, strict=True), reverse=True)[:count]
    target = f"{place}/{draw.fresh()}.txt"
    found = [f"{size} {name}" for size, name in ranked]
    ask = (
        f"Find the {count} largest files below `{folder}` (at any depth) and write them to `{target}`, largest first, "
        "each as "
        f"`BYTES PATH` with one blank between, PATH relative to `{folder}` and without `./`."
    )
    solution = f"find {folder} -type f -printf '%s %P\\n' | sort -nr | head -n {count} > {target}\n"
    output = DataFile(target, "lines", lines=tuple(found))
    return TaskPart(ask, solution, (Lines(target, found),), _under(folder, files), output=output)


def linked(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Link to the newest and to the oldest release, chosen by version and not by name."""
    folder = f"{place}/releases"
    minors = draw.sample(range(1, 30), 5)
    versions = [f"2.{minor}.{draw.between(0, 12)}" for minor in minors]
    newest, oldest = max(zip(minors, versions, strict=True))[1], min(zip(minors, versions, strict=True))[1]
    files = {f"{folder}/{version}/VERSION": f"{version}\n" for version in versions}
    ask = (
        f"`{folder}` has one directory for each release, named by its version (numbers apart from each other by dots; "
        "2.10 is "
        f"newer than 2.9). Make two symbolic links in `{place}`: `current`, to the directory of the newest release, "
        "and "
        "`oldest`, to that of the oldest. The directories stay where they are."
    )
    solution = (
        f"cd {place}\nln -sfn releases/$(ls releases | sort -V | tail -n 1) current\n"
        "ln -sfn releases/$(ls releases | sort -V | head -n 1) oldest\n"
    )
    checks: tuple[AnyCheck, ...] = (
        SymbolicLink(f"{place}/current", f"{folder}/{newest}"),
        SymbolicLink(f"{place}/oldest", f"{folder}/{oldest}"),
        *(FileContent(path, text) for path, text in files.items()),
    )
    return TaskPart(ask, solution, checks, files)


def digested(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Write the digests of files, including the previous part's output if that is the input."""
    folder = f"{place}/{draw.fresh()}"
    files = _under(folder, {f"{word}.txt": draw.prose(2) for word in draw.words(draw.between(2, 4))})
    paths = sorted([*files, *([given.path] if given else [])])
    algorithm = draw.pick(["sha256", "md5", "sha1"])
    target = f"{place}/{draw.fresh()}.{algorithm}"
    ask = (
        f"Write the {algorithm.upper()} digests of {', '.join(f'`{path}`' for path in paths)} to `{target}`, in the "
        "format of "
        f"`{algorithm}sum`: one line for each file, `DIGEST  PATH`, with the paths as they are written here."
    )
    solution = f"{algorithm}sum {shlex.join(paths)} > {target}\n"
    return TaskPart(ask, solution, (Digests(target, paths, algorithm),), files)


def verified(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """List files whose digests are wrong."""
    folder = f"{place}/{draw.fresh()}"
    names = sorted(f"{word}.dat" for word in draw.words(7))
    files = {f"{folder}/{name}": draw.prose(2) for name in names}
    bad = sorted(draw.sample(names, draw.between(2, 3)))
    setup = f"cd {folder}\nsha256sum {' '.join(names)} > SHA256SUMS\n" + "".join(f"echo x >> {name}\n" for name in bad)
    target = f"{place}/{draw.fresh()}.txt"
    ask = (
        f"`{folder}/SHA256SUMS` has the digests of the files beside it. Some files were changed since. Write the "
        "names of "
        f"those whose digest is no longer right to `{target}`, sorted, one per line, without directory. Change "
        "nothing in "
        f"`{folder}`."
    )
    solution = f"cd {folder}\nsha256sum -c SHA256SUMS 2>/dev/null | sed -n 's/: FAILED$//p' | sort > ../bad.tmp\n"
    solution += f"mv ../bad.tmp ../{target.rpartition('/')[2]}\n"
    output = DataFile(target, "lines", lines=tuple(bad))
    initial = (Exists(f"{folder}/SHA256SUMS"),)
    return TaskPart(ask, solution, (Lines(target, bad),), files, setup=setup, initial=initial, output=output)


def reassembled(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Join chunks in numeric order; their numbers have no leading zeros."""
    count = draw.between(11, 14)
    folder, target = f"{place}/chunks", f"{place}/{draw.fresh()}.txt"
    chunks = [draw.prose(draw.between(1, 3)) for _ in range(count)]
    files = {f"{folder}/part.{number}": text for number, text in enumerate(chunks, 1)}
    text = "".join(chunks)
    ask = (
        f"A text was cut into the files `{folder}/part.1` to `{folder}/part.{count}`. Put it together again in "
        f"`{target}`, in "
        "the order of the numbers. The parts stay."
    )
    solution = f"for n in $(seq 1 {count}); do cat {folder}/part.$n; done > {target}\n"
    output = DataFile(target, "lines", lines=tuple(text.splitlines()))
    return TaskPart(ask, solution, (FileContent(target, text, exact=True),), files, output=output)


def scaffolded(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Create a tree from an outline."""
    outline = f"{place}/{draw.fresh()}.txt"
    root = f"{place}/{draw.fresh()}"
    a, b, c = draw.words(3)
    files = {
        f"{a}/{draw.fresh()}.txt": draw.fresh(),
        f"{a}/{b}/{draw.fresh()}.md": draw.fresh(),
        f"{c}.cfg": draw.fresh(),
    }
    files |= {f"{b}/{draw.fresh()}.txt": draw.fresh()}
    text = "".join(f"{path} <- {word}\n" for path, word in files.items())
    ask = (
        f"Each line of `{outline}` is `PATH <- WORD`. Make the directory `{root}` with exactly these files: at each "
        "PATH "
        "(relative to it; make the directories) a file whose only line is the WORD."
    )
    code = (
        f"import os\nfor line in open({outline!r}):\n    path, _, word = line.strip().partition(' <- ')\n"
        f"    path = os.path.join({root!r}, path)\n    os.makedirs(os.path.dirname(path), exist_ok=True)\n"
        "    open(path, 'w').write(word + '\\n')"
    )
    return TaskPart(ask, python(code), (Files(root, {**files}),), {outline: text})


def mode_rules(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    folder = f"{place}/{draw.fresh()}"
    words = draw.words(8)
    rules = {"sh": draw.pick(["755", "750", "700"]), "key": "600", "conf": draw.pick(["640", "660"]), "txt": "444"}
    names = [
        f"{draw.pick(['', 'lib/', 'lib/x/'])}{word}.{ending}" for word, ending in zip(words, [*rules] * 2, strict=True)
    ]
    modes = {name: rules[name.rpartition(".")[2]] for name in names}
    told = "; ".join(f"`.{ending}` files {mode}" for ending, mode in rules.items())
    ask = f"Set the permissions of the files below `{folder}` (at any depth) by their endings: {told}."
    solution = "".join(
        f"find {folder} -name '*.{ending}' -exec chmod {mode} {{}} +\n" for ending, mode in rules.items()
    )
    setup = f"find {folder} -type f -exec chmod 664 {{}} +\n"
    files = {f"{folder}/{name}": f"{draw.fresh()}\n" for name in names}
    return TaskPart(ask, solution, (Modes(folder, modes),), files, setup=setup)


def too_open(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """List the files that others may write, and remove only that permission."""
    folder, target = f"{place}/{draw.fresh()}", f"{place}/{draw.fresh()}.txt"
    names = [f"{draw.pick(['', 'shared/'])}{word}.txt" for word in draw.words(8)]
    before = {name: draw.pick(["666", "646", "777", "600", "644", "755"]) for name in names}
    before[names[0]], before[names[1]] = "666", "644"
    open_ones = sorted(name for name, mode in before.items() if int(mode, 8) & 2)
    after = {name: f"{int(mode, 8) & ~2:o}" for name, mode in before.items()}
    setup = "".join(f"chmod {mode} {folder}/{name}\n" for name, mode in before.items())
    ask = (
        f"Find the files below `{folder}` that others (neither owner nor group) may write. Write their paths to "
        f"`{target}`, "
        f"relative to `{folder}` and without `./`, sorted in byte order, one per line. Then take from each of them "
        "that one "
        "right; all other permissions of all files stay."
    )
    solution = (
        f"find {folder} -type f -perm -o+w -printf '%P\\n' | LC_ALL=C sort > {target}\n"
        f"find {folder} -type f -perm -o+w -exec chmod o-w {{}} +\n"
    )
    files = {f"{folder}/{name}": "data\n" for name in names}
    initial = (Modes(folder, before),)
    return TaskPart(
        ask, solution, (Lines(target, open_ones), Modes(folder, after)), files, setup=setup, initial=initial
    )


def private(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Set modes by rules for directories and files, and keep executables executable."""
    folder = f"{place}/{draw.fresh()}"
    a, b = draw.words(2)
    names = [f"{a}/{draw.fresh()}.txt", f"{a}/{b}/{draw.fresh()}.txt", f"{draw.fresh()}.txt"]
    programs = [f"{a}/{draw.fresh()}", f"{b}/{draw.fresh()}"]
    modes = {a: "750", f"{a}/{b}": "750", b: "750", **dict.fromkeys(names, "640"), **dict.fromkeys(programs, "750")}
    setup = f"chmod -R u=rwX,go=rwX {folder}\n" + "".join(f"chmod 777 {folder}/{name}\n" for name in programs)
    ask = (
        f"Close `{folder}` to others: every directory below it gets mode 750, every file that its owner may execute "
        "750, and "
        "every other file 640."
    )
    solution = (
        f"find {folder} -mindepth 1 -type d -exec chmod 750 {{}} +\nfind {folder} -type f -perm -u+x -exec chmod 750 "
        f"{{}} +\n"
        f"find {folder} -type f ! -perm -u+x -exec chmod 640 {{}} +\n"
    )
    files = {f"{folder}/{name}": "text\n" for name in [*names, *programs]}
    return TaskPart(ask, solution, (Modes(folder, modes),), files, setup=setup)


def _zip(folder: str, target: str) -> str:
    """Return a shell script that zips the content of a directory with Python, because `zip` may be missing."""
    return f"(cd {folder} && python3 -m zipfile -c ../{target} *)\n"


def packed(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Pack a directory without the files that have certain endings."""
    folder = f"{place}/{draw.fresh()}"
    kept = {f"{draw.pick(['', 'sub/', 'sub/x/'])}{word}.txt": draw.prose(2) for word in draw.words(5)}
    junk = {f"{draw.pick(['', 'sub/'])}{word}.{draw.pick(['log', 'tmp'])}": "junk\n" for word in draw.words(4)}
    name = folder.rpartition("/")[2]
    mode, ending = draw.pick((("w:gz", "tar.gz"), ("w:bz2", "tar.bz2"), ("w:xz", "tar.xz"), ("w", "tar")))
    target = f"{place}/{draw.fresh()}.{ending}"
    ask = (
        f"Pack the directory `{folder}` into `{target}` (a tar file, compressed as the ending says), without the "
        "files whose "
        f"names end in `.log` or `.tmp`. The members' names begin with `{name}/`. The directory stays as it is."
    )
    solution = python(  # not tar, because bzip2 and xz may be missing
        f"import tarfile\nwith tarfile.open({target!r}, {mode!r}) as tar:\n"
        f"    tar.add({folder!r}, {name!r}, filter=lambda m: None if m.name.endswith(('.log', '.tmp')) else m)"
    )
    members = {f"{name}/{path}": text for path, text in kept.items()}
    files = {f"{folder}/{path}": text for path, text in {**kept, **junk}.items()}
    return TaskPart(ask, solution, (Archive(target, "tar", members),), files)


def unpacked(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Unpack only some members of a tar file."""
    folder, target, archive = f"{place}/build", f"{place}/{draw.fresh()}", f"{place}/{draw.fresh()}.tar.gz"
    wanted, other = draw.sample(["docs", "src", "data", "conf"], 2)
    inside = {f"{wanted}/{draw.pick(['', 'deep/'])}{word}.txt": draw.prose(2) for word in draw.words(4)}
    outside = {f"{other}/{word}.txt": draw.prose(1) for word in draw.words(3)}
    files = {f"{folder}/{path}": text for path, text in {**inside, **outside}.items()}
    setup = f"tar -C {folder} -czf {archive} .\nrm -r {folder}\n"
    ask = (
        f"`{archive}` is a compressed tar file. Unpack only its directory `{wanted}` into the new directory "
        f"`{target}`, so that "
        f"what is `{wanted}/x.txt` there becomes `{target}/x.txt` here (and likewise further down). Nothing else may "
        "be in "
        f"`{target}`."
    )
    solution = f"mkdir -p {target}\ntar -C {target} --strip-components=2 -xzf {archive} ./{wanted}\n"
    after: dict[str, str | None] = {path.removeprefix(f"{wanted}/"): text for path, text in inside.items()}
    return TaskPart(ask, solution, (Files(target, after),), files, setup=setup, initial=(Exists(archive),))


def repacked(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Convert a zip file to a tar file with the same members."""
    folder, source = f"{place}/content", f"{draw.fresh()}.zip"
    members = {f"{draw.pick(['', 'a/', 'a/b/'])}{word}.txt": draw.prose(2) for word in draw.words(5)}
    target = f"{place}/{draw.fresh()}.tar.gz"
    files = {f"{folder}/{path}": text for path, text in members.items()}
    setup = _zip(folder, source) + f"rm -r {folder}\n"
    ask = (
        f"Make the gzipped tar file `{target}` out of `{place}/{source}`: the same files with the same names and texts "
        "(a leading `./` does not matter, and entries for directories are up to you)."
    )
    solution = f"d=$(mktemp -d)\npython3 -m zipfile -e {place}/{source} $d\ntar -C $d -czf {target} .\nrm -r $d\n"
    initial = (Exists(f"{place}/{source}"),)
    return TaskPart(ask, solution, (Archive(target, "tar", members),), files, setup=setup, initial=initial)


def zipped(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Pack named files into a zip file."""
    texts = {f"{place}/{word}.txt": draw.prose(2) for word in draw.words(3)}
    target, extra = f"{place}/{draw.fresh()}.zip", f"{place}/{draw.fresh()}.txt"
    names = [path.rpartition("/")[2] for path in texts]
    ask = (
        f"Make the zip file `{target}` of {', '.join(f'`{path}`' for path in texts)}. The members have the files' "
        "names "
        f"without any directory. `{extra}` must not be in it."
    )
    solution = f"cd {place}\npython3 -m zipfile -c {target.removeprefix(place + '/')} {' '.join(names)}\n"
    members = dict(zip(names, texts.values(), strict=True))
    return TaskPart(ask, solution, (Archive(target, "zip", members),), {**texts, extra: draw.prose(1)})


def rotated(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Count the lines that contain a word in logs, some of which are compressed."""
    folder = f"{place}/logs"
    word, count = draw.fresh().upper(), draw.between(3, 5)
    others = draw.words(6)
    files = {
        f"{folder}/app.log{f'.{number}' if number else ''}": "".join(
            f"{draw.sentence(others, 2, 4)}{f' {word}' if draw.chance(40) else ''}\n" for _ in range(12)
        )
        for number in range(count)
    }
    setup = "".join(f"gzip -n {folder}/app.log.{number}\n" for number in range(1, count))
    hits = [sum(line.endswith(f" {word}") for line in text.splitlines()) for text in files.values()]
    names = ["app.log", *(f"app.log.{number}.gz" for number in range(1, count))]
    target = f"{place}/{draw.fresh()}.txt"
    found = [*(f"{name} {number}" for name, number in zip(names, hits, strict=True)), f"total {sum(hits)}"]
    ask = (
        f"`{folder}` has `app.log` and older logs that are gzipped (`app.log.1.gz` and so on). Count the lines that "
        "contain "
        f"`{word}` in each, and write `{target}`: a line `NAME COUNT` for each file in the order `app.log`, "
        "`app.log.1.gz`, "
        "`app.log.2.gz` …, then the line `total COUNT`. The logs stay as they are."
    )
    solution = (
        f"cd {folder}\nt=0\n: > ../out.tmp\nfor n in {' '.join(names)}; do c=$(gzip -cdf $n | grep -c {word} || true)\n"
        f"echo $n $c >> ../out.tmp; t=$((t + c)); done\necho total $t >> ../out.tmp\n"
        f"mv ../out.tmp ../{target.rpartition('/')[2]}\n"
    )
    initial = tuple(Exists(f"{folder}/{name}") for name in names)
    output = DataFile(target, "lines", lines=tuple(found))
    return TaskPart(ask, solution, (Lines(target, found),), files, setup=setup, initial=initial, output=output)


def compressed(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Compress one file and keep the original."""
    path = given.path if given else f"{place}/{draw.fresh()}.txt"
    text = "\n".join(given.lines) + "\n" if given else draw.prose(30)
    target = f"{place}/{draw.fresh()}.gz"
    ask = f"Compress `{path}` with gzip to `{target}`. `{path}` itself stays."
    files = {} if given else {path: text}
    return TaskPart(ask, f"gzip -c {path} > {target}\n", (Archive(target, "gzip", {"": text}),), files)


FILES = (
    Family("file-rename", renamed),
    Family("file-sort", by_ending),
    Family("file-duplicates", duplicates),
    Family("file-prune", pruned),
    Family("file-largest", largest),
    Family("file-link", linked),
    Family("file-digest", digested, takes=(DataKind.TABLE, DataKind.LINES)),
    Family("file-verify", verified),
    Family("file-reassemble", reassembled),
    Family("file-scaffold", scaffolded),
    Family("mode-rules", mode_rules),
    Family("mode-open", too_open),
    Family("mode-private", private),
)

ARCHIVES = (
    Family("archive-pack", packed),
    Family("archive-unpack", unpacked),
    Family("archive-repack", repacked),
    Family("archive-zip", zipped),
    Family("archive-logs", rotated),
    Family("archive-gzip", compressed, takes=(DataKind.LINES,)),
)
