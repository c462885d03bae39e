"""Operations of the E2B SDK for Python, whose results are printed one a line. `operations.mjs` is the same program
in JavaScript, and both print `transcript.txt`. It runs in an environment of its own, without palaestra."""

import json
import time
import urllib.request

from e2b import (
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    Template,
    TimeoutException,
)

count = 0


def op(name, result):
    global count
    count += 1
    print(f"{count} {name}: {json.dumps(result, ensure_ascii=False, separators=(',', ':'))}", flush=True)


def refused(kind, call):
    try:
        call()
    except kind:
        return "refused"
    return "accepted"


def until(condition):
    end = time.time() + 20
    while not condition():
        assert time.time() < end
        time.sleep(0.05)
    return True


tag = {"run": "sixty"}
box = Sandbox.create(timeout=120, metadata=tag, envs={"OUTER": "o"})
op("create", bool(box.sandbox_id))
op("is running", box.is_running())
info = box.get_info()
op("info: metadata", info.metadata)
op("info: state", info.state.value)
op("info: template", info.template_id)
running = SandboxQuery(metadata=tag, state=[SandboxState.RUNNING])
op("list by metadata", [each.sandbox_id == box.sandbox_id for each in Sandbox.list(query=running).next_items()])
op("list by other metadata", len(Sandbox.list(query=SandboxQuery(metadata={"run": "x"})).next_items()))
second = Sandbox.create(timeout=120, metadata=tag)
pages = Sandbox.list(query=running, limit=1)
first_page = pages.next_items()
op("list: first page", [len(first_page), pages.has_next])
second_page = pages.next_items()
op("list: second page", [len(second_page), pages.has_next])
op("kill", second.kill())
op("kill again", second.kill())
op("info of a killed one", refused(SandboxNotFoundException, second.get_info))
box.set_timeout(300)
left = (box.get_info().end_at - box.get_info().started_at).total_seconds()
op("set timeout", 290 < left < 320)
op("metrics", box.get_metrics()[0].mem_total > 0)
op("wrong key", refused(AuthenticationException, lambda: Sandbox.create(api_key="e2b_wrong_key")))
op("unknown template", refused(Exception, lambda: Sandbox.create("no-such-template")))

ran = box.commands.run("echo out; echo err >&2; echo $OUTER $INNER; pwd", envs={"INNER": "i"})
op("run: stdout", ran.stdout)
op("run: stderr", ran.stderr)
op("run: exit code", ran.exit_code)
try:
    box.commands.run("echo partly; exit 7")
except CommandExitException as error:
    op("run: failure", [error.exit_code, error.stdout])
op("run: cwd", box.commands.run("pwd", cwd="/tmp").stdout)
op("run: root", box.commands.run("echo $HOME; id -u", user="root").stdout)
op("run: timeout", refused(TimeoutException, lambda: box.commands.run("sleep 30", timeout=0.5)))
pieces = []
box.commands.run("echo one; sleep 0.3; echo two", on_stdout=pieces.append)
op("run: callbacks", "".join(pieces))
op("run: long output", len(box.commands.run("seq 1 100000").stdout))
op("run: unicode", box.commands.run("printf 'h\\303\\251'").stdout)
handle = box.commands.run("read line; echo got $line; cat", background=True, stdin=True)
op("background: listed", [each.pid == handle.pid for each in box.commands.list()])
box.commands.send_stdin(handle.pid, "first\n")
box.commands.send_stdin(handle.pid, "second\n")
box.commands.close_stdin(handle.pid)
op("background: input and output", handle.wait().stdout)
sleeper = box.commands.run("sleep 100", background=True)
op("background: kill", box.commands.kill(sleeper.pid))
op("background: kill again", box.commands.kill(sleeper.pid))
talker = box.commands.run("read x; echo later", background=True, stdin=True)
talker.disconnect()
followed = box.commands.connect(talker.pid)
box.commands.send_stdin(talker.pid, "\n")
op("background: connect", followed.wait().stdout)
op("background: connect to nothing", refused(NotFoundException, lambda: box.commands.connect(99999)))

shown = b""


def on_pty(data):
    global shown
    shown += data


pty = box.pty.create(PtySize(rows=30, cols=100))
box.pty.send_stdin(pty.pid, b"stty size; exit\n")
pty.wait(on_pty=on_pty)
op("pty: size", b"30 100" in shown)
pty = box.pty.create(PtySize(rows=30, cols=100))
box.pty.resize(pty.pid, PtySize(rows=40, cols=90))
box.pty.send_stdin(pty.pid, b"stty size; exit\n")
shown = b""
pty.wait(on_pty=on_pty)
op("pty: resize", b"40 90" in shown)
pty = box.pty.create(PtySize(rows=30, cols=100))
op("pty: kill", box.pty.kill(pty.pid))

op("files: write", box.files.write("notes/a.txt", "hello").path)
op("files: read", box.files.read("notes/a.txt"))
op("files: read bytes", list(box.files.read("notes/a.txt", format="bytes")))
op("files: overwrite", [box.files.write("notes/a.txt", "bye").name, box.files.read("notes/a.txt")])
several = [{"path": "notes/b", "data": "1"}, {"path": "/tmp/c", "data": "2"}]
op("files: write several", [each.path for each in box.files.write_files(several)])
op("files: read nothing", refused(FileNotFoundException, lambda: box.files.read("none")))
op("files: exists", [box.files.exists("notes/a.txt"), box.files.exists("none")])
entry = box.files.get_info("notes/a.txt")
op("files: info", [entry.name, entry.type.value, entry.size, entry.permissions])
op("files: make directory", [box.files.make_dir("d/e"), box.files.make_dir("d/e")])
op("files: list", sorted(each.name for each in box.files.list("notes")))
op("files: list deep", sorted(each.path for each in box.files.list("/home/user/d", depth=2)))
op("files: list a file", refused(InvalidArgumentException, lambda: box.files.list("notes/a.txt")))
op("files: rename", box.files.rename("notes/a.txt", "notes/z.txt").path)
box.files.remove("notes/b")
op("files: remove", box.files.exists("notes/b"))
large = "x" * 12_000_000
box.files.write("large", large)
op("files: large", box.files.read("large") == large)
op("files: stream", sum(len(piece) for piece in box.files.read("large", format="stream")))
watch = box.files.watch_dir("d")
box.files.write("d/new", "x")
seen = set()
until(lambda: seen.update(each.type.value for each in watch.get_new_events()) or {"create", "write"} <= seen)
op("files: watch", sorted(seen))
watch.stop()
op("files: download address", urllib.request.urlopen(box.download_url("notes/z.txt")).read().decode())

forks = box.fork(count=2)
forks[0].files.write("notes/z.txt", "of the fork")
op("fork", [each.files.read("notes/z.txt") for each in (*forks, box)])
op("fork: kill", [each.kill() for each in forks])
snapshot = box.create_snapshot()
copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
op("snapshot", copy.files.read("notes/z.txt"))
copy.kill()
op("snapshot: list and delete", [
    len(Sandbox.list_snapshots(box.sandbox_id).next_items()), Sandbox.delete_snapshot(snapshot.snapshot_id),
    len(Sandbox.list_snapshots(box.sandbox_id).next_items()),
])  # fmt: skip
counter = box.commands.run("while true; do date +%s%N > /tmp/now; sleep 0.02; done", background=True)
op("pause", [box.pause(), box.is_running(), box.pause()])
op("connect", [Sandbox.connect(box.sandbox_id).is_running(), box.commands.kill(counter.pid)])
op("template exists", [Template.exists("base"), Template.exists("no-such-template")])
box.kill()
op("run in a killed one", refused(TimeoutException, lambda: box.commands.run("true")))
