"""The programs of a check start as they were prepared, whatever the agent put in their place."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from envs.scripts import groups_file, need_level
from palaestra.cli.main import main
from palaestra.rollouts.grading.tampering import Rule
from palaestra.sandbox.slot import Change

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
    assert len(lines) == (1 if musl else 2) and "/opt/first/" not in str(lines), lines
    assert musl or "/usr/local/lib/" in lines[1], lines
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


UNDECLARED = """
from palaestra import Task, environment

WORK = '''
mkdir -p /opt/made ~/lib /var/tmp/mine || true
for f in answer.txt /opt/made/a /usr/local/bin/greet ~/notes ~/.rc ~/lib/x /etc/made /var/lib/made /tmp/made; do
  echo made > $f || true
done
echo kept > /var/tmp/kept
'''
OUTSIDE = "/opt/made /usr/local/bin/greet ~/notes ~/.rc ~/lib /etc/made /var/lib/made"

@environment(toolsets=["terminal"])
def undeclared():
    yield Task(id="bare", prompt="?", solution=WORK)
    yield Task(id="declared", prompt="?", solution=WORK, paths=["/root/notes", "/tmp/made"])

@undeclared.score
async def seen(task, sandbox):
    assert await sandbox.read_text("answer.txt") == "made\\n"
    found = (await sandbox.execute(f"ls -d {OUTSIDE} 2>/dev/null")).output.split()
    assert [path.rpartition("/")[2] for path in found] == ([] if task.id == "bare" else ["notes"]), found
    if sandbox.rung.label != "confined":  # where commands have no /tmp
        assert (await sandbox.read_text("/tmp/made", missing="")) == ("" if task.id == "bare" else "made\\n")
    return 0.25
"""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_a_check_sees_only_what_its_task_declares(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("undeclared_env.py").write_text(UNDECLARED)
    argv = ["run", "undeclared_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", level]
    assert main(argv) == 0
    assert [json.loads(line)["scores"] for line in groups_file().read_text().splitlines()] == [[0.25]] * 2


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


class Had:
    """A root of these files."""

    async def names(self, directory: str) -> frozenset[str]:
        inside = f"{directory.rstrip('/')}/"
        return frozenset(path[len(inside) :].split("/")[0] for path in HAD if path.startswith(inside))


@pytest.mark.parametrize(
    ("path", "gone"),
    [
        ("/bin/sh", True),
        ("usr/bin/[", True),
        ("/usr/local/bin/cat", True),
        ("/etc/alternatives/awk", True),
        ("/usr/bin/bash", True),
        ("/usr/local/bin/python3", True),
        ("/usr/local/bin/python3.11", True),
        ("/usr/local/bin/python3.13", True),
        ("/usr/local/bin/node", True),
        ("/usr/local/bin/backup.sh", True),
        ("/usr/sbin/nginx", True),
        ("/usr/local/bin/git", True),
        ("/root/.jq", True),
        ("/home/user/.sqliterc", True),
        ("/root/.config/jq/x.jq", True),
        ("/etc/magic", True),
        ("/usr/share/misc/magic.mgc", True),
        ("/usr/local/share/perl/5.36.0/strict.pm", True),
        ("/root/.node_modules/fs.js", True),
        ("/usr/local/include/stdio.h", True),
        ("/usr/local/include/mine.h", False),
        ("/usr/include/stdio.h", True),
        ("/usr/include/mine.h", False),
        ("/usr/share/zoneinfo/UTC", True),
        ("/usr/share/zoneinfo/Mine", False),
        ("/usr/local/go/src/fmt/print.go", True),
        ("/usr/local/go/src/fmt/new.go", False),
        ("/opt/conda/lib/python3.11/os.py", True),
        ("/opt/conda/lib/python3.11/os.so", True),
        ("/opt/conda/lib/python3.11/new.py", False),
        ("/opt/conda/lib/python3.11/site-packages/new.py", False),
        ("/root/.bashrc", True),
        ("/root/notes/.jq", False),
        ("/root/notes.txt", False),
        ("/home/user/perl5/lib/perl5/strict.pm", True),
        ("/root/node_modules/fs.js", True),
        ("/usr/games/fortune", True),
        ("/opt/tools/bin/jq", True),
        ("/opt/other/bin/jq", False),
        ("/usr/bin/jq", True),
        ("/usr/bin/x/cat", False),
        ("/app/bin/bash", False),
        ("/workspace/bin/cat", False),
        # the loader
        ("/etc/ld.so.preload", True),
        ("/etc/ld.so.cache", True),
        ("/etc/ld.so.conf", True),
        ("/etc/ld.so.conf.d/00.conf", True),
        ("/etc/ld.so.conf.d/00\n.conf", True),
        ("/etc/nsswitch.conf", True),
        ("/usr/lib/x86_64-linux-gnu/libtinfo.so.6.4", True),
        ("/usr/lib/x86_64-linux-gnu/libtinfo.so.7", False),
        ("/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libz.so.1", True),
        ("/usr/lib/x86_64-linux-gnu/gconv/new.so", True),
        ("/usr/lib/x86_64-linux-gnu/gconv/gconv-modules.d/new\n.conf", True),
        ("/lib/libz.so.1", True),
        ("/usr/lib/x86_64-linux-gnu/libcurl.so.4", False),
        ("/usr/lib/firefox/libz.so.1", False),
        ("/usr/local/lib/libz.so.1", False),
        ("/usr/local/lib/libtask.so", True),
        ("/usr/lib/git-core/git-status", True),
        ("/usr/lib/git-core/git-new", False),
        # Python
        ("/usr/lib/python3/usercustomize.py", True),
        ("/usr/lib/python3/dist-packages/sitecustomize.py", True),
        ("/usr/lib/python3/dist-packages/sitecustomize/__init__.py", True),
        ("/workspace/sitecustomize.py", False),
        ("/usr/lib/python3/dist-packages/zz.pth", True),
        ("/root/.local/lib/python3.11/site-packages/zz.pth", True),
        ("/workspace/venv/lib/python3.11/site-packages/zz.pth", False),
        ("/app/data.pth", False),
        ("/usr/pyvenv.cfg", True),
        ("/usr/bin/pyvenv.cfg", True),
        ("/opt/venv/pyvenv.cfg", False),
        ("/usr/lib/python311.zip", True),
        ("/opt/a\nb/lib/python311.zip", True),
        ("/usr/bin/lib/python3.11/os.py", True),
        ("/usr/lib/python3.11/os.py", True),
        ("/usr/lib/python3.11/os.so", True),
        ("/usr/lib/python3.11/os/__init__.py", True),
        ("/usr/lib/python3.11/__pycache__/os.cpython-311.pyc", True),
        ("/usr/lib/python3.11/distutils/__init__.so", True),
        ("/usr/lib/python3.11/distutils/command/build.py", False),
        ("/usr/lib/python3.11/lib-dynload/os.so", True),
        ("/usr/lib/python3.11/lib-dynload/_tkinter.so", False),
        ("/usr/lib/python3.11/tkinter/__init__.py", False),
        ("/usr/lib/python3.12/os.py", False),
        ("/usr/lib/python3/dist-packages/_pytest/new.py", True),
        ("/usr/local/lib/python3.11/dist-packages/pytest-9.dist-info/METADATA", True),
        ("/usr/lib/python3/dist-packages/_distutils_hack/__init__.py", True),
        ("/usr/lib/python3/dist-packages/requests/api.py", False),
        # Perl and Ruby
        ("/usr/share/perl5/strict.pm", True),
        ("/usr/lib/x86_64-linux-gnu/perl5/5.36/JSON/PP.pm", True),
        ("/usr/share/perl5/JSON.pm", False),
        ("/usr/lib/ruby/vendor_ruby/json.rb", True),
        ("/usr/lib/ruby/vendor_ruby/3.1.0/json.rb", True),
        ("/usr/local/lib/site_ruby/json.rb", True),
        ("/usr/lib/ruby/vendor_ruby/rake.rb", False),
        ("/usr/local/lib/python3.11/dist-packages/numpy/__init__.py", False),
    ],
)
def test_what_a_check_meets_before_its_own_code_is_as_it_was(path: str, gone: bool) -> None:
    rule = Rule("/workspace", directories=frozenset({"/opt/tools/bin"}))
    found = asyncio.run(rule.planted([Change(path, "file")], Had().names))
    assert found == ((path,) if gone else ())


def test_a_directory_counts_where_it_hides_what_was_there() -> None:
    changes = [
        Change("/usr/lib/x86_64-linux-gnu", "dir"),
        Change("/usr/lib/git-core", "dir", opaque=True),
        Change("/usr/lib", "symlink"),
        Change("/usr/lib/python3/dist-packages/requests", "dir", opaque=True),
        Change("/bin", "dir", opaque=True),
        Change("/usr/bin/python3", "deleted"),
    ]
    found = asyncio.run(Rule("/workspace").planted(changes, Had().names))
    assert found == ("/bin", "/usr/bin/python3", "/usr/lib", "/usr/lib/git-core")


def test_a_directory_of_programs_is_none_of_the_programs_that_a_task_names() -> None:
    rule = Rule("/app", new_programs=frozenset({"bin"}), directories=frozenset({"/opt/tools/bin"}))
    changes = [
        Change("/bin", "symlink"),
        Change("/snap/bin", "symlink"),
        Change("/usr/bin", "deleted"),
        Change("/opt", "symlink"),
        Change("/root", "symlink"),
        Change("/usr/local/share/perl", "symlink"),
        Change("/opt/other", "symlink"),
    ]
    found = set(asyncio.run(rule.planted(changes, Had().names)))
    assert found == {"/bin", "/snap/bin", "/usr/bin", "/root", "/usr/local/share/perl", "/opt", "/opt/tools/bin"}


def left_out(rule: Rule, *paths: str) -> tuple[str, ...]:
    return asyncio.run(rule.planted([Change(path, "file") for path in paths], Had().names))


def test_a_task_names_programs_that_may_be_replaced_or_added() -> None:
    assert left_out(Rule("/", programs=frozenset({"git"})), "/usr/bin/git", "/usr/bin/jq") == ("/usr/bin/jq",)
    new = Rule("/", new_programs=frozenset({"git", "gcc"}))
    assert left_out(new, "/usr/local/bin/git", "/usr/bin/x86_64-linux-gnu-gcc-12", "/usr/bin/as", "/usr/bin/jq") == (
        "/usr/bin/jq",
        "/usr/local/bin/git",
    )


def test_a_declared_path_of_a_home_is_shown() -> None:
    assert left_out(Rule("/", declared=("/root/.bashrc",)), "/root/.bashrc", "/root/.profile") == ("/root/.profile",)
    assert left_out(Rule("/", declared=("/root",)), "/root/.bashrc") == ("/root/.bashrc",)


def test_installed_files_below_a_declared_path_are_shown() -> None:
    rule = Rule("/usr/src/app", declared=("/usr/src/app", "/usr/share/zoneinfo"))
    assert left_out(rule, "/usr/share/zoneinfo/UTC", "/usr/include/stdio.h") == ("/usr/include/stdio.h",)


def test_a_workspace_that_is_the_whole_root_hides_no_start_up_file() -> None:
    assert left_out(Rule("/"), "/app/sitecustomize.py") == ("/app/sitecustomize.py",)


def test_names_like_options_and_modules_beside_a_script_are_left_out() -> None:
    started = "/.palaestra-carried/tmp/usercustomize.py"
    hidden = ("/.palaestra-carried/tmp/json.py", "/var/tmp/requests/__init__.py", "/workspace/--x", "/workspace/a/-rf")
    shown = ("/.palaestra-carried/tmp/mine.py", "/workspace/json.py", "/tmp/a/json.py", "/tmp/json", "/workspace/a-b")
    assert left_out(Rule("/workspace"), started, *hidden, *shown) == tuple(sorted([started, *hidden]))
    assert left_out(Rule("/workspace", text="-rf, --x, /tmp/json.py, requests.py"), *hidden) == ()
    changes = [Change("/tmp/json", "symlink"), Change("/workspace/-d", "dir")]
    assert asyncio.run(Rule("/workspace").planted(changes, Had().names)) == ("/tmp/json", "/workspace/-d")
