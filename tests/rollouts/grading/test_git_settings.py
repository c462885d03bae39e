"""No git setting of the agent starts a program during a check, and settings that start none stay."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from envs.scripts import groups_file, need_level
from palaestra.cli.main import main
from palaestra.rollouts.grading.git_settings import harmless_settings, repository_of
from palaestra.sandbox.slot import Change

REPOSITORY = """
from palaestra import Task, environment

PROGRAM = "printf '#!/bin/sh\\\\ntouch /workspace/started\\\\ncat\\\\n' > run.sh; chmod +x run.sh; "
MOVED = "mv .git meta && echo 'gitdir: meta' > .git; "
SET = "git config core.fsmonitor $PWD/run.sh"
FILTER = "git config filter.f.clean $PWD/run.sh; echo '*.txt filter=f' > .gitattributes; sleep 1; touch a.txt"
WORK = {
    "fsmonitor": SET,
    "filter": FILTER,
    "diff": "git config diff.external $PWD/run.sh; echo b > a.txt",
    "textconv": "git config diff.d.textconv $PWD/run.sh; echo 'a.txt diff=d' > .git/info/attributes; echo b > a.txt",
    "hooks-path": "mkdir h; cp run.sh h/post-index-change; git config core.hooksPath $PWD/h; sleep 1; touch a.txt",
    "hook": "mkdir -p .git/hooks; cp run.sh .git/hooks/post-index-change; sleep 1; touch a.txt",
    "hooks-link": "rm -rf .git/hooks; mkdir h; cp run.sh h/post-index-change; ln -s ../h .git/hooks; sleep 1; "
                  "touch a.txt",
    "moved": MOVED + SET,
    "moved-to-scratch": "mv .git /var/tmp/g; echo 'gitdir: /var/tmp/g' > .git; " + SET,
    "split": "mkdir c; mv .git/objects .git/refs .git/config c/; echo ../c > .git/commondir; " + SET,
    "split-and-linked": "mkdir c; mv .git/objects stored; mv .git/refs .git/config c/; ln -s ../stored c/objects; "
                        "echo ../c > .git/commondir; " + SET,
    "worktree": "git config extensions.worktreeConfig true; git config --worktree core.fsmonitor $PWD/run.sh",
    "included": "git config -f other core.fsmonitor $PWD/run.sh; git config include.path $PWD/other",
    "linked": SET + "; mv .git/config kept; ln -s ../kept .git/config",
    "hard-linked": SET + "; ln .git/config kept",
    "one-line": "printf '[core] fsmonitor = /workspace/run.sh\\\\n' >> .git/config",
    "two-sections": "printf '[alias][core]\\nfsmonitor = /workspace/run.sh\\n' >> .git/config",
    "carriage-return": "printf '[core]\\\\r\\\\nfsmonitor = /workspace/run.sh\\\\r\\\\n' >> .git/config",
    "new-repository": "rm -rf .git; git init -q; git add a.txt; " + SET,
    "honest": "git config user.name me; git config user.email me@here; git remote add origin ../r; "
              "git config alias.st 'status --short'; git checkout -q -b side; echo b > b.txt; git add b.txt; "
              "git commit -qm 'Add b'; git config branch.side.description 'a \\"quoted\\" one'",
    "named": "git config core.hooksPath h; mkdir h; cp run.sh h/pre-push",
    "declared": "git config core.editor /workspace/run.sh",
}

@environment(toolsets=["terminal"])
def repository():
    for name, script in WORK.items():
        yield Task(
            id=name,
            prompt="Set core.hooksPath." if name == "named" else "Write down the state.",
            setup="git init -q && echo a > a.txt && git add a.txt "
                  "&& git -c user.name=a -c user.email=a@b commit -qm start",
            solution=PROGRAM + script,
            paths=["/workspace/.git/config"] if name == "declared" else [],
        )

@repository.score
async def state(task, sandbox):
    for command in ("git status", "git diff", "git log -p", "git add -A", "git stash list"):
        await sandbox.execute(f"cd /workspace && {command}")
    started = (await sandbox.execute("test -e /workspace/started")).success
    if task.id == "honest":
        said = await sandbox.execute(
            "git config user.name; git remote get-url origin; git st; git config branch.side.description"
        )
        return not started and said.output == 'me\\n../r\\nA  run.sh\\na "quoted" one\\n'
    if task.id in ("named", "declared"):
        name = "core.hooksPath" if task.id == "named" else "core.editor"
        return not started and (await sandbox.execute(["git", "config", name])).success
    return started
"""


PREPARED = """
from palaestra import Task, environment

SYSTEM = "export GIT_CONFIG_NOSYSTEM=1; "  # the level `confined` has no /etc/gitconfig
PROGRAM = SYSTEM + "printf '#!/bin/sh\\ntouch /workspace/started\\ncat\\n' > run.sh; chmod +x run.sh; "
SET = "config core.fsmonitor /workspace/run.sh; "
SETTINGS = "printf '[core]\\nfsmonitor = /workspace/run.sh\\n' > "
COMMIT = "git -c user.name=a -c user.email=a@b commit --allow-empty -qm start; "
PUSH = "git init -q; " + COMMIT + "git push -q s.git HEAD:refs/heads/b"
BASE = "git init -q; echo a > a.txt; git add a.txt; " + COMMIT
CHANGED = "; sleep 1; touch a.txt"
LONG = "d=$(printf 'abcdefghijklmnop/%.0s' $(seq 180)); mkdir -p $d; ln -s $d s; cd s; mkdir -p $d; ln -s $d s; "
MANY = "python3 -c 'import os; [(os.mkdir(\\"a\\" * 60), os.chdir(\\"a\\" * 60)) for _ in range(300)]; " \\
    "[(os.mkdir(str(n)), open(str(n) + \\"/config\\", \\"w\\")) for n in range(190)]'; "
ATTACKS = {  # the preparation, the work, and the first command of the check
    "init": ("true", "mkdir .git; " + SETTINGS + ".git/config", "git init -q"),
    "init-hook": ("true", "mkdir -p .git/hooks; cp run.sh .git/hooks/post-index-change", "git init -q"),
    "init-link": ("true", "mkdir meta; " + SETTINGS + "meta/config; ln -s meta .git", "git init -q"),
    "init-halves": ("true", "mkdir .git m; " + SETTINGS + "m/config; echo ../m > .git/commondir", "git init -q"),
    "init-linked-halves": ("true", "mkdir .git m; " + SETTINGS + "m/config; echo ../m > to; ln -s ../to .git/commondir",
                           "git init -q"),
    "init-link-to-halves": ("true", "mkdir meta m; " + SETTINGS + "m/config; echo ../m > meta/commondir; "
                            "echo ref: refs/heads/a > meta/HEAD; ln -s meta .git", "git init -q"),
    "init-bare": ("true", "mkdir -p s.git/hooks; cp run.sh s.git/hooks/update", "git init -q --bare s.git; " + PUSH),
    "prepared-path": (BASE + "git config core.hooksPath h; mkdir h",
                      "cp run.sh h/post-index-change" + CHANGED, "true"),
    "read-only": (BASE + "mkdir -p .git/hooks",
                  "cp run.sh .git/hooks/post-index-change; chmod 555 .git/hooks" + CHANGED, "true"),
    "prepared-link": (BASE + "rm -rf .git/hooks; ln -s ../h .git/hooks; mkdir h",
                      "cp run.sh h/post-index-change" + CHANGED, "true"),
    "prepared-include": (BASE + "git config include.path ../.gitconfig",
                         "git config -f .gitconfig core.fsmonitor $PWD/run.sh", "true"),
    "word": ("git init -q --bare s.git", "cp run.sh s.git/hooks/update", PUSH),
    "too-deep": (BASE, "d=$(printf 'a/%.0s' $(seq 410)); mkdir -p $d; mv .git ${d}g; echo gitdir: ${d}g > .git; "
                 "git " + SET + "rm -f started", "true"),
    "too-long": (BASE, LONG + "cd /workspace; mv .git s/s/g; ln -s s/s/g .git; git " + SET + "rm -f started", "true"),
    "too-many-bytes": (BASE, MANY + "mv .git b; echo gitdir: b > .git; git " + SET + "rm -f started", "true"),
    "copied-link": ("true", "git init -q /var/tmp/x; git -C /var/tmp/x " + SET + "ln -s /var/tmp/x work", "cd work"),
}
HONEST = {
    "update": ("git init -q --bare s.git", "cp run.sh s.git/hooks/update", PUSH),
    "partial": (BASE, "git config uploadpack.allowFilter true; "
                "git -c protocol.file.allow=always clone -qn --filter=blob:none file:///workspace p",
                "git -C p checkout -q HEAD && mv p/a.txt started"),
    "ignored": (BASE, "echo a.log > i; touch a.log; git config core.excludesFile i",
                "git status --porcelain -uall | grep -q log || touch started"),
    "other-hooks": ("mkdir -p src/objects", "mkdir src/hooks; echo a > src/hooks/a.js", "mv src/hooks/a.js started"),
    "dotfile": ("true", "git config -f .gitconfig core.editor vi",
                "git config -f .gitconfig core.editor && touch started"),
    "settings-of-others": ("true", "mkdir .aws; printf '[default]\\nregion = a\\n' > .aws/config",
                           "grep -q region .aws/config && touch started"),
}

@environment(toolsets=["terminal"])
def prepared():
    for name, (setup, work, check) in (ATTACKS | HONEST).items():
        prompts = {"update": "Add an update hook.", "dotfile": "Set the editor in .gitconfig."}
        prompt = prompts.get(name, "Please update the repository in work.")
        yield Task(id=name, prompt=prompt, setup=SYSTEM + setup, solution=PROGRAM + work, data=check)

@prepared.score
async def started(task, sandbox):
    await sandbox.execute(f"{SYSTEM} cd /workspace; {task.data}; git status; git diff; git add -A")
    return (await sandbox.execute("test -e /workspace/started")).success
"""


def _scores(text: str, level: str) -> dict[str, list[float]]:
    """Play the tasks of an environment once, and return their scores."""
    need_level(level)
    Path("own_env.py").write_text(text)
    argv = ["run", "own_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", level]
    assert main(argv) == 0
    rows = [json.loads(line) for line in groups_file().read_text().splitlines()]
    return {row["task_id"]: row["scores"] for row in rows}


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_git_starts_no_program_of_the_agent(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scores = _scores(REPOSITORY, level)
    assert len(scores) == 22
    assert [name for name, score in scores.items() if score == [1.0]] == ["honest", "named", "declared"]
    assert [*scores.values()].count([0.0]) == 19


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_a_repository_that_the_check_or_the_task_makes_starts_none(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scores = _scores(PREPARED, level)
    honest = ["update", "partial", "ignored", "other-hooks", "dotfile", "settings-of-others"]
    assert [name for name, score in scores.items() if score == [1.0]] == honest
    assert [*scores.values()].count([0.0]) == 16


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("[core]\n\tbare = false\n\tfsmonitor = run\n", {"core.bare": "false"}),
        ("[CORE]\nBare=false\nFSMonitor=run\n", {"core.bare": "false"}),
        ("[core] pager = run\n[user]\nname = a # b\n", {"user.name": "a"}),
        ("[core]\nbare = false \\\nfsmonitor = run\nfilemode = true\n", {"core.filemode": "true"}),
        ('[branch "a\\"]b"]\nmerge = refs/heads/x\ncommand = run\n', {'branch.a"]b.merge': "refs/heads/x"}),
        ('[filter "f"]\nclean = run\n[include]\npath = /x\n[url "ext::run "]\ninsteadOf = r\n', {}),
        ("[core.x]\nbare = false\n[remote.y]\nurl = r\n", {}),
        ("name = a\n[user]\nname = b\n", {"user.name": "b"}),
        ("[alias]\nst = !run\n", {"alias.st": "!run"}),
        ("; [core]\n# fsmonitor = run\n[core]\n;\nsymlinks\n", {"core.symlinks": ""}),
        ("[core]\nbare = false\x0b\nfsmonitor\x0b= run\n\x85fsmonitor = run\n", {"core.bare": "false\x0b"}),
    ],
)
def test_only_harmless_settings_are_left(text: str, left: dict[str, str], tmp_path: Path) -> None:
    kept = harmless_settings(text)
    file = tmp_path / "config"
    file.write_bytes(kept.encode("utf-8", "surrogateescape"))
    listed = subprocess.run(["git", "config", "-f", file, "-l", "-z"], capture_output=True, check=True).stdout.decode()
    assert dict((*entry.split("\n", 1), "")[:2] for entry in listed.split("\0") if entry) == left
    assert harmless_settings(kept) == kept


def test_a_setting_that_a_task_names_is_left() -> None:
    text = '[core]\n\thooksPath = h\n\teditor = vi\n[filter "Lfs"]\n\tclean = git-lfs clean -- %f\n'
    kept = harmless_settings(text, ["core.hookspath", "filter.lfs.clean"])
    assert kept == text.replace("\teditor = vi\n", "")


@pytest.mark.parametrize(
    ("path", "kind", "repository"),
    [
        ("/workspace/.git/config", "file", "/workspace/.git"),
        ("/workspace/.git/config.worktree", "symlink", "/workspace/.git"),
        ("/srv/r/hooks/post-receive", "file", "/srv/r"),
        ("/srv/r/hooks", "symlink", "/srv/r"),
        ("/srv/r/hooks", "dir", None),
        ("/srv/r/hooks/pre-push.sample", "file", None),
        ("/srv/r/hooks/a/b", "file", None),
        ("/srv/r/config", "deleted", None),
        ("/srv/r/.husky/pre-push", "file", "/srv/r/.husky"),
        ("/srv/r/update", "file", None),
        ("/srv/r/.gitconfig", "file", "/srv/r"),
        ("/srv/r/.config/git/config", "file", "/srv/r/.config/git"),
        ("/srv/r/.git", "symlink", "/srv/r/.git"),
        ("/srv/r/.git", "file", None),
        ("/srv/r/.config/git", "symlink", "/srv/r/.config/git"),
        ("/srv/r.git/commondir", "file", "/srv/r.git/commondir"),
        ("/srv/r/.git/worktrees/a/commondir", "file", None),
        ("/srv/r/config/app.yaml", "file", None),
    ],
)
def test_settings_and_hooks_are_found_by_path(path: str, kind: str, repository: str | None) -> None:
    assert repository_of(Change(path, kind)) == repository
