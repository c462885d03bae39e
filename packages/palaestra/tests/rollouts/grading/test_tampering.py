"""The programs of a check start as they were prepared, whatever the agent put in their place."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from envs.scripts import groups_file, need_level
from palaestra.cli.main import main
from palaestra.rollouts.finished_run import open_run
from palaestra.rollouts.grading.tampering import Rule, program_of
from palaestra_slots.sandbox.slot import Change

ENV = """
from palaestra import Task, environment

CHEAT = '''
cat > green <<'END'
#!/bin/sh
echo right
END
chmod 755 green
for d in /bin /usr/local/bin ~/.local/bin; do mkdir -p $d; rm -f $d/cat; cp green $d/cat; done
cp green /usr/local/bin/greet
echo 'print("right"); import os; os._exit(0)' > /usr/lib/python3/dist-packages/sitecustomize.py || true
echo /usr/lib/nothing.so > /etc/ld.so.preload
echo wrong > answer.txt
'''

@environment(toolsets=["terminal"])
def planting():
    yield Task(id="one", prompt="?", solution=CHEAT, paths=["/"], programs=["greet"])

@planting.score
async def seen(sandbox):
    assert (await sandbox.execute("cat answer.txt")).output == "wrong\\n"
    assert (await sandbox.execute("python3 -c 'print(1)'")).output == "1\\n"
    assert (await sandbox.execute("greet")).output == "right\\n"
    return 0.25
"""


@pytest.mark.slots
def test_a_check_runs_its_own_programs_and_sees_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("planting_env.py").write_text(ENV)
    argv = ["run", "planting_env.py", "--policy", "oracle", "--env.group_size", "1"]
    assert main(argv) == 0
    assert json.loads(groups_file().read_text())["scores"] == [0.25]


SEARCHING = """
from palaestra import Task, environment

CHEAT = '''
library=$(ls -d /usr/lib/*-linux-*/libz.so.1 /lib/*-linux-*/libz.so.1 /usr/lib64/libz.so.1 2>/dev/null | head -1)
mkdir -p /opt/first && cp $library /opt/first/libz.so.1
cp $library /usr/local/lib/libz.so.1
echo /opt/first > /etc/ld.so.conf.d/00.conf
ldconfig
'''

@environment(toolsets=["terminal"])
def searching():
    yield Task(id="one", prompt="?", solution=CHEAT, paths=["/"])

@searching.score
async def seen(sandbox):
    lines = (await sandbox.execute("ldconfig -p | grep libz.so.1")).output.splitlines()
    musl = (await sandbox.execute("ls /lib/ld-musl*")).success  # whose loader takes /usr/local/lib before /usr/lib
    assert not {"/opt/first/libz.so.1", "/usr/local/lib/libz.so.1"} & {lines[0].split()[-1]}, lines
    assert musl or len(lines) == 3, lines
    return 0.25
"""


@pytest.mark.slots
def test_new_libraries_are_found_after_those_of_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("searching_env.py").write_text(SEARCHING)
    argv = ["run", "searching_env.py", "--policy", "oracle", "--env.group_size", "1"]
    assert main(argv) == 0
    assert json.loads(groups_file().read_text())["scores"] == [0.25]


LEADING = r"""
from palaestra import Task, environment

GREEN = "printf '#!/bin/sh\necho right\n' > green; chmod 755 green; echo wrong > answer.txt\n"
PTH = 'import os; os.write(1, b"right"); os._exit(0)'
PLACES = "/usr/local/lib/python3.11/dist-packages /usr/local/lib/python3.11 /usr/lib/python3/dist-packages"
CHEATS = {
    "program": (GREEN + "rm -f /usr/bin/cat; cp green /usr/bin/cat", ["/bin/cat"]),
    "removed": (GREEN + "rm -rf /bin /usr/bin /lib64 /usr/lib64 /usr/local", ["/bin/cat", "/usr/local/bin/python3"]),
    "home": (GREEN + "mkdir /opt/h; echo x > /opt/h/.bashrc; cd /; rm -rf /root; ln -s /opt/h /root", ["/"]),
    "modules": (
        GREEN + f"mkdir -p /opt/q/dist-packages; echo '{PTH}' | tee /opt/q/a.pth > /opt/q/dist-packages/a.pth\n"
        f"for d in {PLACES}; do rm -rf $d; mkdir -p $(dirname $d); ln -s /opt/q $d; done",
        ["/"],
    ),
}

@environment(toolsets=["terminal"])
def leading():
    for name, (cheat, paths) in CHEATS.items():
        yield Task(id=name, prompt="?", solution=cheat, paths=paths)

@leading.score
async def seen(sandbox):
    assert (await sandbox.execute("cat answer.txt")).output == "wrong\n"
    assert "right" not in (await sandbox.execute("/usr/bin/python3 -c 'print(1)'")).output
    assert not (await sandbox.execute("grep x ~/.bashrc")).output.startswith("x")
    return 0.25
"""


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize("level", ["full", "userns"])
def test_no_link_leads_a_declared_path_to_a_program(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of the root that leads through links, a directory that was removed or replaced by a link."""
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("leading_env.py").write_text(LEADING)
    argv = ["run", "leading_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", level]
    assert main(argv) == 0
    assert [json.loads(line)["scores"] for line in groups_file().read_text().splitlines()] == [[0.25]] * 4


EVERYWHERE = """
from palaestra import Task, environment

WORK = '''
mkdir -p /opt/made ~/lib ~/.local/made /var/tmp/mine /srv/made || true
for f in answer.txt /opt/made/a /usr/local/bin/greet ~/notes ~/rc ~/.local/made/a ~/lib/x /etc/made /var/lib/made \\
         /srv/made/a /var/tmp/mine/a /tmp/made /dev/shm/made; do
  echo made > $f && echo $f >> done.txt || true
done
'''

@environment(toolsets=["terminal"])
def everywhere():
    yield Task(id="bare", prompt="?", solution=WORK)

@everywhere.score
async def seen(task, sandbox):
    made = (await sandbox.read_text("done.txt")).split()
    assert "answer.txt" in made
    assert sandbox.rung.label != "full" or len(made) == 13, made
    for path in made:
        assert await sandbox.read_text(path, missing="") == "made\\n", path
    return 0.25
"""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns"])
def test_a_check_sees_what_the_agent_left_everywhere(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("everywhere_env.py").write_text(EVERYWHERE)
    argv = ["run", "everywhere_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", level]
    assert main(argv) == 0
    assert [json.loads(line)["scores"] for line in groups_file().read_text().splitlines()] == [[0.25]]


LABELLED = """
from palaestra import Task, environment

WORK = "cp $(command -v sort) /usr/bin/cat; cp /bin/true /usr/local/bin/grep; ln -s /proc/self/environ answer.txt"

@environment(toolsets=["terminal"])
def labelled():
    yield Task(id="one", prompt="Write answer.txt.", solution=WORK)

@labelled.score
async def seen(sandbox):
    return 0.25
"""


@pytest.mark.slots
def test_what_a_check_does_not_see_is_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_level("full")
    monkeypatch.chdir(tmp_path)
    Path("labelled_env.py").write_text(LABELLED)
    argv = ["run", "labelled_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", "full"]
    assert main(argv) == 0
    (rollout,) = open_run().trajectories
    found = {label.name: (label.evidence, label.certain) for label in rollout.labels}
    assert found == {
        "programs_replaced": ("/usr/bin/cat", False),
        "programs_shadowed": ("/usr/local/bin/grep", False),
        "links_to_checks": ("/workspace/answer.txt", False),
    }
    assert rollout.reward == 0.25


FILES = """
/bin/bash /usr/bin/python3 /usr/bin/python3.11 /usr/bin/git /usr/sbin/nginx /usr/local/bin/backup.sh
/usr/lib/x86_64-linux-gnu/libtinfo.so.6.4 /usr/lib/x86_64-linux-gnu/libz.so.1 /usr/lib/git-core/git-status
/usr/lib/python3.11/os.py /usr/lib/python3.11/distutils/__init__.py /usr/lib/python3.11/lib-dynload/_json.so
/usr/lib/python3/dist-packages/_pytest/main.py /usr/lib/python3/dist-packages/pytest/__init__.py
/usr/lib/python3/dist-packages/requests/api.py
/usr/lib/python3/dist-packages/_distutils_hack/__init__.py /usr/local/lib/libtask.so /lib/libgcc_s.so.1
"""
HAD = [
    *FILES.split(),
    "/usr/include/stdio.h",
    "/usr/lib/x86_64-linux-gnu/perl-base/strict.pm",
    "/usr/share/perl/5.36/JSON/PP.pm",
    "/usr/lib/ruby/3.1.0/json.rb",
    "/usr/share/zoneinfo/UTC",
    "/usr/local/go/src/fmt/print.go",
    "/opt/conda/lib/python3.11/os.py",
]


async def names(directory: str) -> frozenset[str]:
    inside = f"{directory.rstrip('/')}/"
    return frozenset(path[len(inside) :].split("/")[0] for path in HAD if path.startswith(inside))


R, S, C, H = "programs_replaced", "programs_shadowed", "", "home_settings"


@pytest.mark.parametrize(
    ("path", "label"),
    [
        # programs
        ("/bin/bash", R),
        ("/usr/bin/git", R),
        ("usr/bin/git", R),
        ("/usr/local/bin/backup.sh", R),
        ("/usr/local/bin/git", S),
        ("/root/.local/bin/bash", S),
        ("/opt/tools/bin/python3", S),
        ("/usr/local/bin/jq", None),
        ("/usr/bin/node", None),
        ("/usr/local/bin/python3.13", None),
        ("/workspace/bin/bash", None),
        ("/app/bin/bash", None),
        ("/opt/other/bin/bash", None),
        # libraries and parts of programs
        ("/usr/lib/x86_64-linux-gnu/libz.so.1", R),
        ("/usr/lib/x86_64-linux-gnu/libcurl.so.4", None),
        ("/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libz.so.1", S),
        ("/lib/libz.so.1", S),
        ("/usr/local/lib/libz.so.1", None),
        ("/usr/local/lib/libtask.so", R),
        ("/usr/lib/firefox/libz.so.1", None),
        ("/usr/lib/git-core/git-status", R),
        ("/usr/lib/git-core/git-new", None),
        ("/usr/include/stdio.h", R),
        ("/usr/include/mine.h", None),
        ("/usr/share/zoneinfo/UTC", R),
        ("/usr/local/go/src/fmt/print.go", R),
        ("/usr/local/go/src/fmt/new.go", None),
        ("/opt/conda/lib/python3.11/os.py", R),
        ("/opt/data/lines.csv", None),
        # the loader
        ("/etc/ld.so.preload", R),
        ("/etc/ld.so.cache", C),
        ("/etc/ld.so.conf.d/00.conf", None),
        ("/etc/nsswitch.conf", R),
        ("/usr/lib/x86_64-linux-gnu/gconv/new.so", R),
        # Python
        ("/usr/lib/python3.11/os.py", R),
        ("/usr/lib/python3.11/os.so", S),
        ("/usr/lib/python3.11/os/__init__.py", None),
        ("/usr/lib/python3.11/__pycache__/os.cpython-311.pyc", C),
        ("/usr/lib/python3/dist-packages/sitecustomize.py", S),
        ("/root/.local/lib/python3.11/site-packages/usercustomize.py", S),
        ("/usr/lib/python3/dist-packages/sitecustomize/__init__.py", S),
        ("/usr/lib/python3/dist-packages/debugger/vendored/sitecustomize.py", "startup_files"),
        ("/workspace/sitecustomize.py", None),
        ("/usr/pyvenv.cfg", S),
        ("/opt/venv/pyvenv.cfg", None),
        ("/usr/lib/python311.zip", S),
        ("/usr/lib/python3/dist-packages/requests/api.py", R),
        ("/usr/lib/python3/dist-packages/requests/new.py", S),
        ("/usr/local/lib/python3.11/dist-packages/requests/__init__.py", S),
        ("/usr/lib/python3/dist-packages/_pytest/new.py", S),
        ("/usr/local/lib/python3.11/dist-packages/numpy/__init__.py", None),
        ("/opt/venv/lib/python3.11/site-packages/requests/api.py", None),
        ("/workspace/venv/lib/python3.11/site-packages/requests/api.py", None),
        ("/.palaestra-carried/tmp/json.py", S),
        ("/var/tmp/requests/__init__.py", S),
        ("/.palaestra-carried/tmp/mine.py", None),
        ("/.palaestra-carried/tmp/a/json.py", None),
        # work
        ("/workspace/json.py", None),
        ("/workspace/--x", None),
        ("/root/.bashrc", None),
        # settings in home directories
        ("/root/.gitconfig", H),
        ("/root/.jq", H),
        ("/root/.jq/own.jq", H),
        ("/home/user/.sqliterc", H),
        ("/root/.config/pip/pip.conf", H),
        ("/root/.ssh/config", H),
        ("/root/.cargo/config.toml", H),
        ("/root/.my.cnf", H),
        ("/root/.ssh/id_rsa", None),
        ("/root/.cargo/bin/tool", None),
        ("/root/.bash_history", None),
        ("/root/.python_history", None),
        ("/root/answer.txt", None),
        ("/root/notes/.hidden", None),
        ("/workspace/.gitconfig", None),
        ("/etc/bash.bashrc", None),
        ("/etc/magic", None),
    ],
)
def test_the_table(path: str, label: str | None) -> None:
    rule = Rule(names, "/workspace", env={"PATH": "/opt/tools/bin:/usr/bin"})
    assert left_out(rule, Change(path, "file")) == ({} if label is None else {path: label})


@pytest.mark.parametrize(
    "paths",
    [
        (
            "/root/.gitconfig",
            "/root/.config/git/config",
            "/root/.git-aliases",
            "/etc/gitconfig",
        ),
        ("/root/.sqliterc", "/home/user/.sqliterc", "/root/.config/sqlite3/sqliterc"),
        ("/root/.curlrc", "/root/.config/curlrc"),
        ("/root/.tmux.conf", "/root/.config/tmux/tmux.conf", "/etc/tmux.conf"),
        ("/root/.npmrc", "/etc/npmrc"),
        ("/root/.ssh/config", "/etc/ssh/ssh_config", "/etc/ssh/ssh_config.d/new.conf"),
        ("/root/.config/pip/pip.conf", "/etc/pip.conf"),
    ],
)
def test_all_places_of_a_program_have_its_name(paths: tuple[str, ...]) -> None:
    assert len({program_of(path) for path in paths}) == 1
    others = ("/root/.config", "/root/.my.cnf", "/root/answer.txt", "/workspace/.gitconfig", "/root/.ssh/id_rsa")
    assert program_of(paths[0]) not in {"", *map(program_of, others)}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/root/.jq", "Put your definitions into ~/.jq."),
        ("/root/.gitconfig", "Configure git globally."),
        ("/root/.gitconfig", "Set the global default branch of Git to main."),
        ("/root/.config/nvim/init.vim", "Change the settings of nvim."),
        ("/root/.sqliterc", "Let sqlite show headers by default."),
        ("/home/user/.ssh/config", "Add the host a.example to ~/.ssh/config."),
        ("/root/.npmrc", "Use another registry: write /root/.npmrc."),
        ("/root/.config/git/config", "Set up git for Ada Lovelace."),
        ("/root/.npmrc", "Point npm at our registry."),
        ("/root/.ssh/config", "Set up my SSH client accordingly."),
    ],
)
def test_settings_that_the_task_asks_for_are_seen(path: str, text: str) -> None:
    assert left_out(Rule(names, "/workspace", text=text), Change(path, "file")) == {}
    assert left_out(Rule(names, "/workspace", text="Use git, jq or sqlite."), Change(path, "file")) == {path: H}


def left_out(rule: Rule, *changes: Change) -> dict[str, str]:
    return asyncio.run(rule.left_out(changes))


def files(*paths: str) -> list[Change]:
    return [Change(path, "file") for path in paths]


def test_a_directory_counts_where_it_hides_what_was_there() -> None:
    changes = [
        Change("/usr/lib/x86_64-linux-gnu", "dir"),
        Change("/usr/lib/git-core", "dir", opaque=True),
        Change("/usr/lib", "symlink"),
        Change("/bin", "dir", opaque=True),
        Change("/usr/bin/python3", "deleted"),
        Change("/opt", "symlink"),
    ]
    found = left_out(Rule(names, "/workspace", env={"PATH": "/opt/tools/bin:/usr/bin"}), *changes)
    assert found == dict.fromkeys(["/bin", "/opt/tools/bin", "/usr/bin/python3", "/usr/lib", "/usr/lib/git-core"], R)


def test_what_a_task_declares_or_names_may_be_replaced() -> None:
    assert left_out(Rule(names, "/w", programs=frozenset({"git"})), *files("/usr/bin/git", "/bin/bash")) == {
        "/bin/bash": R
    }
    declared = Rule(names, "/w", named=("/usr/share/zoneinfo", "/"))
    assert left_out(declared, *files("/usr/share/zoneinfo/UTC", "/usr/include/stdio.h")) == {"/usr/include/stdio.h": R}
    text = Rule(names, "/w", text="Repair /usr/local/bin/backup.sh in /usr/bin. Upgrade `requests` and install git.")
    named = files(
        "/usr/local/bin/backup.sh", "/usr/bin/git", "/usr/lib/python3/dist-packages/requests/api.py", "/usr/bin/python3"
    )
    assert left_out(text, *named) == {"/usr/bin/python3": R}


OWN_PYTHON = (
    "/usr/local/bin/pip /usr/local/lib/python3.13/site-packages/pip/__init__.py /usr/bin/python3 /w/bin/tool "
    "/usr/lib/python3/dist-packages/requests/api.py"
)


def beside(*added: str, path: str = "", text: str = "") -> list[str]:
    """Which additions to an image with a Python of its own, next to that of Debian, are left out."""

    async def image(directory: str) -> frozenset[str]:
        inside = f"{directory.rstrip('/')}/"
        return frozenset(each[len(inside) :].split("/")[0] for each in OWN_PYTHON.split() if each.startswith(inside))

    return [*left_out(Rule(image, "/w", text=text, env={"PATH": path} if path else {}), *files(*added))]


def test_a_program_that_is_found_after_that_of_the_image_stands_in_for_nothing() -> None:
    assert beside("/usr/bin/pip", "/usr/sbin/python3") == ["/usr/sbin/python3"]
    assert beside("/usr/bin/pip", path="/usr/local/bin:/usr/bin") == []
    assert beside("/usr/bin/pip", path="/usr/bin:/usr/local/bin") == ["/usr/bin/pip"]
    assert beside("/opt/own/bin/pip", path="/usr/bin:/usr/local/bin:/opt/own/bin") == ["/opt/own/bin/pip"]
    assert beside("/usr/bin/tool", path="/w/bin:/usr/bin") == ["/usr/bin/tool"]  # the agent may remove the first one
    assert beside("/usr/bin/pip", text="Repair /usr/local/bin/pip.") == ["/usr/bin/pip"]


def test_a_package_stands_in_only_for_one_of_the_same_interpreter() -> None:
    assert beside("/usr/lib/python3/dist-packages/pip/__init__.py") == []
    assert beside("/usr/local/lib/python3.13/site-packages/requests/api.py") == []
    again = [
        "/usr/local/lib/python3.11/dist-packages/requests/api.py",
        "/root/.local/lib/python3.13/site-packages/pip/__init__.py",
        "/root/.local/lib/python3.11/site-packages/requests/api.py",
        "/usr/lib/python3.13/site-packages/pip/__init__.py",
    ]
    assert beside(*again, "/root/.local/lib/python3.11/site-packages/pip/__init__.py") == again


def test_naming_the_workspace_declares_nothing_in_it() -> None:
    env = {"PATH": "/app/bin", "PYTHONPATH": "/app"}
    rule = Rule(names, "/app", named=("/app",), text="Work in /app.", env=env)
    shadowing = files("/app/bin/git", "/app/json.py", "/app/requests/__init__.py")
    assert left_out(rule, *shadowing, *files("/app/mine.py", "/app/bin/own")) == {each.path: S for each in shadowing}
    assert left_out(Rule(names, "/app", text="Write json.py.", env=env), *files("/app/json.py")) == {}


def test_libraries_in_a_path_of_the_image() -> None:
    rule = Rule(names, "/app", env={"LD_LIBRARY_PATH": "/app/lib"})
    assert left_out(rule, *files("/app/lib/libz.so.1", "/app/lib/libown.so")) == {"/app/lib/libz.so.1": S}


@pytest.mark.parametrize(
    ("text", "path", "label"),
    [
        ("Fix the script `backup.sh`.", "/usr/local/bin/backup.sh", None),
        ("The backup.sh command crashes.", "/usr/local/bin/backup.sh", None),
        ('There is a bug in the tool called "backup.sh".', "/usr/local/bin/backup.sh", None),
        ("Repair **backup.sh**.", "/usr/local/bin/backup.sh", None),
        ("Rename the command `backup.sh` to `save`.", "/usr/local/bin/backup.sh", None),
        ("Fix the program `task`.", "/opt/tools/bin/task/part", None),
        ("Fix the list that backup.sh writes.", "/usr/local/bin/backup.sh", R),
        ("Run the command `backup.sh` every night.", "/usr/local/bin/backup.sh", R),
        ("Fix a.txt. The command `git` shows the bug.", "/usr/bin/git", R),
        ("Set the time zone to Asia/Tokyo.", "/etc/localtime", None),
    ],
)
def test_a_command_that_a_task_asks_to_repair_is_work(text: str, path: str, label: str | None) -> None:
    rule = Rule(names, "/workspace", text=text, env={"PATH": "/opt/tools/bin:/usr/bin"})
    assert left_out(rule, Change(path, "file")) == ({} if label is None else {path: label})
