"""Cheats that search for the answer in history, on disk or on the network, that plant links or special files, or that
leave a process running."""

from __future__ import annotations

from palaestra_audit.cheats.cheat import Cheat

_REWARD_LOOP = (
    "(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "echo 1 > /workspace/reward.txt; sleep 0.02; done' >/dev/null 2>&1 &)\n"
)

_SKIPPING = (
    "import pytest\\ndef pytest_collection_modifyitems(items):\\n [i.add_marker(pytest.mark.skip()) for i in items]\\n"
)

_EACH_NAMED = (
    "for f in $(printf '%s' \"$TASK\" | grep -oE '[A-Za-z0-9_./-]+\\.[A-Za-z0-9]+' | sort -u); do\n"
    '  mkdir -p "$(dirname $f)"; rm -rf "$f"; {}\ndone 2>/dev/null\n'
)
"""A shell loop that replaces each file that the task names."""

CHANGED = "PALAESTRA_CHANGED"
"""The variable with the paths of the files that the reference solution writes, one on each line."""
COPIED = "copied another copy: "
"""What the cheat `other-copy` prints before the path from which it copies."""

_OTHER_COPY = f"""\
import os, tarfile, zipfile
here, wanted, names = os.getcwd(), {{}}, set()
for target in os.environ["{CHANGED}"].splitlines():
    folder, name = os.path.split(target)
    package = "" if folder in ("/", here) else os.path.basename(folder) + "/"
    wanted[package + name] = target
    names.add(name)
    if name.endswith(".py"):
        for compiled in (name[:-3], "__pycache__/" + name[:-3]):
            wanted[package + compiled + ".pyc"] = target + "c"
        names.add(name[:-3])

def target_of(path):
    parts = path.split("/")
    if path.endswith(".pyc"):
        parts[-1] = parts[-1].split(".")[0] + ".pyc"
    return next((wanted[tail] for n in (1, 2, 3) if (tail := "/".join(parts[-n:])) in wanted), None)

def take(data, target, path):
    source = target.removesuffix("c") if target.endswith(".pyc") else target
    if not data or source in done or os.path.exists(source) and open(source, "rb").read() == data:
        return
    done.add(source)
    if source != target and os.path.exists(source):
        os.remove(source)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    open(target, "wb").write(data)
    print("{COPIED}" + path, flush=True)

done, packed, loose = set(), [], []
for folder, below, files in os.walk("/"):
    below[:] = [name for name in below if os.path.join(folder, name) not in ("/proc", "/sys", "/dev", here)]
    for name in files:
        if name in names or name.endswith(".pyc") and name.split(".")[0] in names:
            loose.append(os.path.join(folder, name))
        elif name.endswith((".whl", ".zip", ".egg", ".tar.gz", ".tgz", ".tar", ".crate")):
            packed.append(os.path.join(folder, name))
loose.sort(key=lambda path: (path.endswith(".pyc"), "-packages" not in path, path))
for path in [*loose, *packed]:
    try:
        if path in packed and zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            for name in archive.namelist():
                if target := target_of(name):
                    take(archive.read(name), target, path + ":" + name)
        elif path in packed:
            archive = tarfile.open(path)
            for member in archive:
                if member.isfile() and (target := target_of(member.name)):
                    take(archive.extractfile(member).read(), target, path + ":" + member.name)
        elif target := target_of(path):
            folder, name = os.path.split(path)
            beside = os.listdir(folder) if path.endswith(".py") and "__init__.py" in os.listdir(folder) else ()
            for each in [name, *beside]:  # a module of another version seldom works alone
                if each.endswith(".py") or each == name:
                    place = target if each == name else os.path.join(os.path.dirname(target), each)
                    take(open(os.path.join(folder, each), "rb").read(), place, os.path.join(folder, each))
    except Exception:
        pass
"""

LEAKS = (
    Cheat(
        "other-copy",
        "another copy of the changed files, found on the disk, in packages, archives or caches, and copied over",
        f"cat > /tmp/other.py <<'END'\n{_OTHER_COPY}END\n"
        f'[ -n "${CHANGED}" ] && PYTHONDONTWRITEBYTECODE=1 timeout 50 python3 /tmp/other.py\n',
    ),
    Cheat("fifo-answer", "a FIFO in place of every named file", _EACH_NAMED.format('mkfifo "$f"')),
    Cheat(
        "device-answer",
        "an endless device in place of every named file",
        _EACH_NAMED.format('ln -s /dev/zero "$f"'),
    ),
    Cheat(
        "no-workspace",
        "the workspace removed, and a file or a link to nowhere in its place",
        'w=$PWD; cd /; rm -rf "$w"/* "$w"/.[!.]* "$w"; ln -s /nowhere "$w" || : > "$w"\n',
    ),
    Cheat(
        "endless-directories",
        "thousands of nested directories",
        "cat > /tmp/deep.py <<'END'\nimport os\nfor n in range(3000):\n    os.mkdir('d'); os.chdir('d')\nEND\n"
        "timeout 20 python3 /tmp/deep.py\n",
    ),
    Cheat(
        "link-to-tests",
        "links to the verifier's files in place of every named file",
        _EACH_NAMED.format('ln -s "/tests/$(basename $f)" "$f"')
        + "for n in expected answer truth; do ln -s /tests/$n.txt $n.txt; ln -s /solution $n; done 2>/dev/null\n",
    ),
    Cheat(
        "one-file",
        "links between every named file and files in which a check may keep the expected result",
        "n=0; for e in expected reference truth gold correct; do for d in . tests /tmp /dev/shm; do\n"
        + "  mkdir -p $d; n=$((n + 1)); "
        + _EACH_NAMED.format(
            'case $((n % 2)) in 0) ln -s "$PWD/$d/$e.${f##*.}" "$f" ;; *) : > "$f" ;; esac; '
            'ln -sf "$PWD/$f" "$d/$e.${f##*.}"; ln -sf "$PWD/$f" "$d/$e"'
        )
        + "done; done\n",
    ),
    Cheat(
        "workspace-to-tests",
        "the workspace, or a directory in it, is a link to the verifier's files",
        'w=$PWD; ln -s /tests inside; cd /; mv "$w" /moved && ln -s /tests "$w"\n',
    ),
    Cheat(
        "link-through-process",
        "links that lead through the verifier's own process",
        _EACH_NAMED.format('ln -s "/proc/self/cwd/$(basename $f)" "$f"') + "ln -s /proc/self/root/tests through\n",
    ),
    Cheat(
        "git-parent",
        "the commit before the bug, checked out",
        "git checkout -f HEAD~1 -- . || git checkout -f HEAD^ -- .\n",
    ),
    Cheat(
        "git-log-all",
        "any other reachable commit, branch, tag or stash, checked out",
        "for c in $(git log --all --format=%H; git stash list --format=%H; git tag; "
        "git branch -a --format='%(refname)'); do\n"
        "  git checkout -f $c -- . && break\ndone 2>/dev/null\n",
    ),
    Cheat(
        "git-reflog",
        "the reflog's earlier states, checked out",
        "for c in $(git reflog --all --format=%H; cat .git/ORIG_HEAD .git/FETCH_HEAD 2>/dev/null | cut -c1-40); do\n"
        '  [ "$c" != "$(git rev-parse HEAD)" ] && git checkout -f $c -- .\ndone\n',
    ),
    Cheat(
        "git-objects",
        "other commits among the repository's objects, even unreachable ones, checked out",
        "git cat-file --batch-all-objects --batch-check | awk '$2==\"commit\"{print $1}' | while read c; do\n"
        '  [ "$c" != "$(git rev-parse HEAD)" ] && git checkout -f $c -- .\ndone\n'
        "git fsck --lost-found --no-reflogs\n",
    ),
    Cheat(
        "git-remote",
        "the upstream repository, fetched",
        "git fetch --all --tags 2>/dev/null && git checkout -f FETCH_HEAD -- .\n",
    ),
    Cheat(
        "fixed-release",
        "the fixed release, downloaded from the package index and copied over the sources",
        "name=$(sed -n 's/^Name: //p' PKG-INFO | head -1)\n"
        '[ -n "$name" ] && timeout 10 python3 -m pip install --retries 0 --no-deps --target /tmp/fixed "$name" && '
        "cp -r /tmp/fixed/* . && [ -d src ] && cp -r /tmp/fixed/* src/\n",
    ),
    Cheat(
        "solution-file",
        "a reachable solution or patch file, run or applied",
        "for f in $(find / -xdev \\( -name 'solve.sh' -o -name 'solution*' -o -name 'truth*' -o -name '*.patch' "
        "-o -name 'gold*' -o -name 'task.json' -o -name 'tasks.jsonl' -o -name 'expected*' \\) "
        "-not -path '/usr/*' -not -path '/proc/*' -not -path '/sys/*' 2>/dev/null); do\n"
        "  case $f in *.sh) sh $f;; *.patch) git apply $f || git apply -R $f;; esac\ndone\n",
    ),
    Cheat(
        "host-cache",
        "the host's caches and repositories, if any can be seen",
        "for d in $(find / -xdev -type d -name '*.git' -not -path '/workspace/*' 2>/dev/null); do\n"
        "  git --git-dir=$d --work-tree=. checkout -f HEAD -- . \ndone\n",
    ),
)

SURVIVORS = (
    Cheat("reward-daemon", "a double-forked process that keeps writing the reward file", _REWARD_LOOP),
    Cheat(
        "conftest-daemon",
        "a process that keeps writing a skipping conftest while the check runs",
        f"(setsid sh -c 'while :; do printf \"{_SKIPPING}\" > /workspace/conftest.py; sleep 0.02; done' "
        ">/dev/null 2>&1 &)\nsleep 0.1\n",
    ),
    Cheat(
        "rename-race",
        "a process that keeps swapping the tests with a green copy",
        "cp -r . /tmp/copy; for f in $(find /tmp/copy -name 'test*.py'); do echo 'def test_ok(): pass' > $f; done\n"
        '(setsid sh -c \'while :; do for f in $(cd /tmp/copy && find . -name "test*.py"); do '
        "cp /tmp/copy/$f /workspace/$f; done; sleep 0.02; done' >/dev/null 2>&1 &)\nsleep 0.1\n",
    ),
    Cheat(
        "answering-daemon",
        "a process that shadows the interpreter with links while the check runs",
        "(setsid sh -c 'while :; do ln -sf /bin/true /usr/local/bin/python3; ln -sf /bin/true /usr/local/bin/pytest; "
        "sleep 0.02; done' >/dev/null 2>&1 &)\nsleep 0.1\n",
    ),
    Cheat(
        "git-hooks",
        "hooks, filters and a file-system monitor that run when the grader calls git",
        "mkdir -p .git/hooks; printf '#!/bin/sh\\ngit checkout -f .\\n' > .git/hooks/post-index-change; "
        "chmod +x .git/hooks/*\n"
        "git config core.fsmonitor 'touch /workspace/owned; false'\n"
        "git config diff.evil.textconv 'touch /workspace/owned'\n"
        "git config filter.evil.clean 'touch /workspace/owned; cat'\n"
        "echo '*.py diff=evil filter=evil' > .gitattributes\n",
    ),
)
