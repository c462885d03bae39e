"""Archives: packed, unpacked, repacked and read without unpacking."""

from __future__ import annotations

from palaestra.suites.endless_terminals.checks.file_checks import Exists, Files, Lines
from palaestra.suites.endless_terminals.checks.program_checks import Archive
from palaestra.suites.endless_terminals.family import Family, Kind, Part, Source, python
from palaestra.suites.endless_terminals.random_stream import Draw


def _zip(folder: str, target: str) -> str:
    """Shell that zips a directory's content with Python: the program `zip` need not be there."""
    return f"(cd {folder} && python3 -m zipfile -c ../{target} *)\n"


def packed(draw: Draw, place: str, given: Source | None) -> Part:
    """A tar file of a directory, without what a pattern names."""
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
    solution = python(  # not tar: bzip2 and xz need not be installed
        f"import tarfile\nwith tarfile.open({target!r}, {mode!r}) as tar:\n"
        f"    tar.add({folder!r}, {name!r}, filter=lambda m: None if m.name.endswith(('.log', '.tmp')) else m)"
    )
    members = {f"{name}/{path}": text for path, text in kept.items()}
    files = {f"{folder}/{path}": text for path, text in {**kept, **junk}.items()}
    return Part(ask, solution, (Archive(target, "tar", members),), files)


def unpacked(draw: Draw, place: str, given: Source | None) -> Part:
    """Only some members of a tar file."""
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
    return Part(ask, solution, (Files(target, after),), files, setup=setup, initial=(Exists(archive),))


def repacked(draw: Draw, place: str, given: Source | None) -> Part:
    """A zip file as a tar file, with the same members."""
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
    return Part(ask, solution, (Archive(target, "tar", members),), files, setup=setup, initial=initial)


def zipped(draw: Draw, place: str, given: Source | None) -> Part:
    """A zip file of named files; the step before may have made one of them."""
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
    return Part(ask, solution, (Archive(target, "zip", members),), {**texts, extra: draw.prose(1)})


def rotated(draw: Draw, place: str, given: Source | None) -> Part:
    """Count in logs that are partly compressed."""
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
    output = Source(target, "lines", lines=tuple(found))
    return Part(ask, solution, (Lines(target, found),), files, setup=setup, initial=initial, output=output)


def compressed(draw: Draw, place: str, given: Source | None) -> Part:
    """Gzip one file beside itself: its own, or what the step before made."""
    path = given.path if given else f"{place}/{draw.fresh()}.txt"
    text = "\n".join(given.lines) + "\n" if given else draw.prose(30)
    target = f"{place}/{draw.fresh()}.gz"
    ask = f"Compress `{path}` with gzip to `{target}`. `{path}` itself stays."
    files = {} if given else {path: text}
    return Part(ask, f"gzip -c {path} > {target}\n", (Archive(target, "gzip", {"": text}),), files)


FAMILIES = (
    Family("archive-pack", packed),
    Family("archive-unpack", unpacked),
    Family("archive-repack", repacked),
    Family("archive-zip", zipped),
    Family("archive-logs", rotated),
    Family("archive-gzip", compressed, takes=(Kind.LINES,)),
)
