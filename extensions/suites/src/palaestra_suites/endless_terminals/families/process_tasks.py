"""Tasks about processes: exit codes, retries, signals, and services that must keep running.

Each function that returns a `TaskPart` builds one kind of task; its docstring describes the work that the task asks
for.
"""

from __future__ import annotations

from palaestra_suites.endless_terminals.checks.data_checks import Json
from palaestra_suites.endless_terminals.checks.file_checks import Exists, FileContent, Lines
from palaestra_suites.endless_terminals.checks.program_checks import Running, Serves
from palaestra_suites.endless_terminals.family import DataFile, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.words import PEOPLE


def exit_codes(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Run every job and record its exit code."""
    folder, target = f"{place}/jobs", f"{place}/{draw.fresh()}.json"
    value: dict[str, int] = {}
    files = {}
    for name in draw.words(draw.between(4, 6)):
        a, b = draw.between(2, 40), draw.between(2, 40)
        value[f"{name}.sh"] = (a * b) % 7
        files[f"{folder}/{name}.sh"] = f"#!/bin/bash\nx=$(({a} * {b}))\necho working\nexit $((x % 7))\n"
    ask = (
        f"Run each script in `{folder}` with bash and write `{target}`: a JSON object that maps the name of each "
        "script "
        "(without directory) to the exit code that it ended with, as a number."
    )
    code = (
        f"import json, os, subprocess\nresult = {{n: subprocess.run(['bash', '{folder}/' + n]).returncode "
        f"for n in os.listdir('{folder}')}}\njson.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), files)


def until_success(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Retry a command that fails several times; its token depends on the number of runs."""
    needed, base = draw.between(3, 7), draw.between(100, 999)
    script, target, word = f"{place}/flaky.sh", f"{place}/{draw.fresh()}.txt", draw.fresh()
    text = (
        "#!/bin/bash\n# Succeeds in the end. Counts its runs in the file `attempts` beside it.\n"
        'cd "$(dirname "$0")"\nn=$(($(cat attempts 2>/dev/null || echo 0) + 1))\necho $n > attempts\n'
        f'if [ $n -lt {needed} ]; then echo "not yet" >&2; exit 1; fi\necho "{word}-$((n * {base}))"\n'
    )
    ask = (
        f"`{script}` (run it with bash) fails now and then and prints a token when it succeeds. Run it again and "
        "again until it "
        f"succeeds for the first time, and not once more; then write its token to `{target}`. It keeps count of its "
        "runs in "
        f"`{place}/attempts`: leave that file as it is then."
    )
    solution = f"until t=$(bash {script} 2>/dev/null); do :; done\necho $t > {target}\n"
    checks = (Lines(target, [f"{word}-{needed * base}"]), Lines(f"{place}/attempts", [str(needed)]))
    return TaskPart(ask, solution, checks, {script: text})


def signalled(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Start a worker and send it signals to report and to stop."""
    count, factor = draw.between(2, 5), draw.between(11, 99)
    script = f"{place}/worker.py"
    report, farewell = f"{place}/report.txt", f"{place}/stopped.txt"
    word = draw.fresh()
    code = (
        "import os, signal, time\nplace = os.path.dirname(os.path.abspath(__file__))\nreports = 0\n"
        "def report(*_):\n    global reports\n    reports += 1\n"
        "    with open(place + '/report.txt', 'a') as file:\n"
        f"        print('{word}', reports * {factor}, file=file)\n"
        "def stop(*_):\n    with open(place + '/stopped.txt', 'w') as file:\n"
        f"        print('stopped after', reports, 'reports', file=file)\n    raise SystemExit\n"
        "signal.signal(signal.SIGUSR1, report)\nsignal.signal(signal.SIGTERM, stop)\n"
        "with open(place + '/worker.pid', 'w') as file:\n    print(os.getpid(), file=file)\n"
        "while True:\n    time.sleep(0.05)\n"
    )
    ask = (
        f"Start `{script}` with python3 in the background; it writes its process id to `{place}/worker.pid` when it "
        "is ready. "
        f"Send it SIGUSR1 {count} times, each time waiting until `{report}` has one line more. Then stop it with "
        "SIGTERM and "
        f"wait until it has ended: it writes `{farewell}` before it does. Leave both files as it wrote them."
    )
    solution = (
        f"python3 {script} </dev/null >/dev/null 2>&1 &\nw=$!\nuntil [ -s {place}/worker.pid ]; do sleep 0.02; done\n"
        f"for n in $(seq 1 {count}); do kill -USR1 $w\n"
        f'until [ "$(wc -l 2>/dev/null < {report} || echo 0)" -ge $n ]; do sleep 0.02; done; done\n'
        f"kill -TERM $w\nwait $w || true\n"
    )
    lines = [f"{word} {number * factor}" for number in range(1, count + 1)]
    checks = (Lines(report, lines), Lines(farewell, [f"stopped after {count} reports"]))
    return TaskPart(ask, solution, checks, {script: code})


def pipeline(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Run a program over many inputs and collect its output in order."""
    names = sorted(draw.words(draw.between(5, 8)))
    factor, script, target = draw.between(3, 9), f"{place}/score.py", f"{place}/{draw.fresh()}.txt"
    texts = {name: draw.sentence() for name in names}
    program = (
        "import sys, time\ntime.sleep(0.05)\ntext = open(sys.argv[1]).read()\n"
        f"print(sum(map(ord, text.strip())) * {factor} % 997)\n"
    )
    found = [f"{name} {sum(map(ord, text)) * factor % 997}" for name, text in texts.items()]
    ask = (
        f"`{script}` (run it with python3) takes the path of a file and prints a number. Run it for every `.txt` file "
        "in "
        f"`{place}/inputs` and write `{target}`: one line `NAME NUMBER` for each, NAME without directory and ending, "
        "sorted by "
        "NAME."
    )
    solution = (
        f'cd {place}/inputs\nfor f in $(LC_ALL=C ls *.txt); do echo "${{f%.txt}} $(python3 ../score.py $f)"; done '
        f"> ../{target.rpartition('/')[2]}\n"
    )
    files = {script: program, **{f"{place}/inputs/{name}.txt": f"{text}\n" for name, text in texts.items()}}
    output = DataFile(target, "lines", lines=tuple(found))
    return TaskPart(ask, solution, (Lines(target, found),), files, output=output)


def snapshot(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Find the descendants of a process in the output of ps."""
    numbers = [1, *sorted(draw.sample(range(100, 9000), draw.between(12, 20)))]
    root = numbers[1]
    parents = {1: 0, root: 1, numbers[2]: root}
    parents |= {number: draw.pick(numbers[:at]) for at, number in enumerate(numbers) if at > 2}
    below: set[int] = set()
    for number in numbers:
        if parents[number] == root or parents[number] in below:
            below.add(number)
    source, target = f"{place}/ps.txt", f"{place}/{draw.fresh()}.txt"
    words = draw.words(5)
    rows = [f"{n:>6} {parents[n]:>6} {draw.pick(PEOPLE).lower():<8} {draw.pick(words)}" for n in draw.shuffled(numbers)]
    text = "   PID   PPID USER     COMMAND\n" + "".join(f"{row}\n" for row in rows)
    ask = (
        f"`{source}` is a listing of processes. Write the process ids (PID) of all descendants of process {root} "
        "(children, "
        f"their children and so on, without {root} itself) to `{target}`, smallest first, one per line."
    )
    code = (
        f"rows = [line.split() for line in open({source!r}).read().splitlines()[1:]]\n"
        f"found, new = set(), {{'{root}'}}\nwhile new:\n"
        "    new = {row[0] for row in rows if row[1] in new} - found\n    found |= new\n"
        f"with open({target!r}, 'w') as file:\n    for number in sorted(map(int, found)):\n        print(number, "
        "file=file)"
    )
    output = DataFile(target, "lines", lines=tuple(str(number) for number in sorted(below)))
    return TaskPart(ask, python(code), (Lines(target, list(output.lines)),), {source: text}, output=output)


def served(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Start a web server that still answers when the work is checked."""
    port, folder = draw.between(20_000, 29_999), f"{place}/site"
    files = {f"{folder}/{word}.txt": draw.prose(2) for word in draw.words(3)}
    page, banner = f"{draw.fresh()}.txt", draw.sentence()
    ask = (
        f"Serve the directory `{folder}` over HTTP on 127.0.0.1 port {port} (Python's `http.server` will do), and add "
        "a page "
        f"`{page}` to it whose only line is `{banner}`. The server must go on running after you have finished."
    )
    solution = (
        f"echo '{banner}' > {folder}/{page}\n"
        f"nohup python3 -m http.server {port} --bind 127.0.0.1 --directory {folder} </dev/null >/dev/null 2>&1 &\n"
        f"until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))' 2>/dev/null; do sleep "
        "0.05; done\n"
    )
    checks = (
        Serves(f"/{page}", port, banner),
        *(Serves(path.removeprefix(folder), port, text) for path, text in files.items()),
    )
    return TaskPart(ask, solution, checks, files, live=True)


def kept_running(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Start a background worker and write its process id to a file."""
    script, pid, word = f"{place}/daemon.py", f"{place}/daemon.pid", draw.fresh()
    state, factor = f"{place}/state.txt", draw.between(100, 999)
    code = (
        "import sys, time\nwith open(sys.argv[2], 'w') as file:\n"
        f"    print(sys.argv[1], len(sys.argv[1]) * {factor}, file=file)\nwhile True:\n    time.sleep(1)\n"
    )
    ask = (
        f"Start `python3 {script} {word} {state}` in the background, in `/workspace`, so that it goes on running "
        "after you have "
        f"finished, and write its process id to `{pid}`. It writes `{state}` when it starts; leave that file as it is."
    )
    solution = (
        f"nohup python3 {script} {word} {state} </dev/null >/dev/null 2>&1 &\necho $! > {pid}\n"
        f"until [ -s {state} ]; do sleep 0.02; done\n"
    )
    checks = (Running(pid, word), FileContent(state, f"{word} {len(word) * factor}\n"))
    return TaskPart(ask, solution, checks, {script: code}, initial=(Exists(script),), live=True)


FAMILIES = (
    Family("process-exit-codes", exit_codes),
    Family("process-retry", until_success),
    Family("process-signal", signalled),
    Family("process-batch", pipeline),
    Family("process-tree", snapshot),
    Family("process-serve", served),
    Family("process-daemon", kept_running),
)
