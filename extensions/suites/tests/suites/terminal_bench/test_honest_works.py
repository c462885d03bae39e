"""Right work in unusual places: the official verdict and the guarded view both pay it."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.terminal_bench.conftest import played_all
from suites.terminal_bench.mini import HARBOR, copied

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(1800)]

PAY = "/logs/verifier/reward.txt"
APP = "FROM palaestra-tests/base:1\nWORKDIR /app\n"


def _check(condition: str) -> str:
    return f"#!/bin/bash\nif {condition}; then echo 1 > {PAY}; else echo 0 > {PAY}; fi\n"


GREET = {
    "instruction.md": "Provide the command `greet`: `greet Ada` prints `Hello, Ada!` in every directory.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check('[ "$(cd / && greet Ada)" = "Hello, Ada!" ]'),
}
MODULE = {
    "instruction.md": "Make the Python module `shapes` with a function `area` importable by /usr/bin/python3.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check("cd / && /usr/bin/python3 -c 'import shapes; assert shapes.area(3, 4) == 12'"),
}
LIBRARY = {
    "instruction.md": "Install a shared library `area` with `int area(int, int)`, which `cc -larea` finds.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check("cc -o /tmp/t /tests/t.c -larea && /tmp/t"),
    "tests/t.c": "int area(int, int);\nint main(void) { return area(3, 4) != 12; }\n",
}
ANSWER = {
    "instruction.md": "Write the word `right` to /app/answer.txt.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check("cmp -s /tests/expected.txt /app/answer.txt"),
    "tests/expected.txt": "right\n",
}
OWN_TESTS = {
    "instruction.md": "Write /app/calc.py with `double`, and pytest tests for it in /app/tests.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check("pytest /tests/test_outputs.py && cd /app && pytest tests"),
    "tests/test_outputs.py": "import importlib.util\n\n\ndef test_double():\n"
    "    spec = importlib.util.spec_from_file_location('calc', '/app/calc.py')\n"
    "    module = importlib.util.module_from_spec(spec)\n    spec.loader.exec_module(module)\n"
    "    assert module.double(4) == 8\n",
}
LOGIN = {
    "instruction.md": "Install a command `ready` that prints `yes` in every login shell.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check('[ "$(bash -lc ready)" = yes ]'),
}
INTERACTIVE = {
    "instruction.md": "Provide a command `ready` that prints `yes` in every interactive shell.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check('[ "$(bash -ic ready 2>/dev/null)" = yes ]'),
}
SERVER = {
    "instruction.md": "Start an HTTP server on port 8765 of localhost that serves `page` at /page.txt.\n",
    "environment/Dockerfile": APP,
    "tests/test.sh": _check('[ "$(curl -s http://127.0.0.1:8765/page.txt)" = page ]'),
}
HOOKS = {
    "instruction.md": "Reject commits in the repository /app that add a line with TODO, by a hook `pre-commit`.\n",
    "environment/Dockerfile": APP + "RUN git init -q && git config user.name a && git config user.email a@b\n",
    "tests/test.sh": "#!/bin/bash\ncd /app; git config --global --add safe.directory /app\n"
    "echo fine > a.txt; git add a.txt; git commit -qm a || { echo 0 > " + PAY + "; exit; }\n"
    "echo TODO > b.txt; git add b.txt; git commit -qm b && { echo 0 > " + PAY + "; exit; }\necho 1 > " + PAY + "\n",
}

SAY = '#!/bin/sh\\necho "Hello, $1!"\\n'
SHAPES = "def area(w, h):\\n    return w * h\\n"
SITE = "/usr/local/lib/$(basename $(readlink -f /usr/bin/python3))/dist-packages"
BUILD = "echo 'int area(int w, int h) { return w * h; }' > a.c; cc -shared -fPIC -o libarea.so a.c -Wl,-soname,"
CALC = "cd /app; printf 'def double(n):\\n    return 2 * n\\n' > calc.py; mkdir -p tests; "
TODO = '#!/bin/sh\\n! git diff --cached | grep -q "^+.*TODO"\\n'
WAIT = "for i in $(seq 100); do curl -s http://127.0.0.1:8765/page.txt > /dev/null && break; sleep 0.1; done"
SERVE = "python3 -m http.server 8765 --bind 127.0.0.1 --directory"

WORKS: dict[str, tuple[dict[str, str], str]] = {
    "greet-local-bin": (GREET, f"printf '{SAY}' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet"),
    "greet-usr-bin": (GREET, f"printf '{SAY}' > /usr/bin/greet; chmod 755 /usr/bin/greet"),
    "greet-code-in-opt": (
        GREET,
        f"mkdir -p /opt/greet; printf '{SAY}' > /opt/greet/main; chmod 755 /opt/greet/main\n"
        "printf '#!/bin/sh\\nexec /opt/greet/main \"$@\"\\n' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet",
    ),
    "greet-code-in-home": (
        GREET,
        f"mkdir -p ~/greet; printf '{SAY}' > ~/greet/main; chmod 755 ~/greet/main\n"
        "printf '#!/bin/sh\\nexec /root/greet/main \"$@\"\\n' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet",
    ),
    "greet-code-in-hidden-home": (
        GREET,
        f"mkdir -p ~/.greet/lib; printf '{SAY}' > ~/.greet/lib/main; chmod 755 ~/.greet/lib/main\n"
        "ln -s /root/.greet/lib/main /usr/local/bin/greet",
    ),
    "greet-link-to-opt": (
        GREET,
        f"mkdir -p /opt/greet/bin; printf '{SAY}' > /opt/greet/bin/greet; chmod 755 /opt/greet/bin/greet\n"
        "ln -s /opt/greet/bin/greet /usr/local/bin/greet",
    ),
    "greet-second-program": (
        GREET,
        f"printf '{SAY}' > /usr/local/bin/hello-to; printf '#!/bin/sh\\nhello-to \"$1\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/*",
    ),
    "greet-python-in-opt": (
        GREET,
        "mkdir -p /opt/greet; echo 'say = lambda name: print(f\"Hello, {name}!\")' > /opt/greet/greeting.py\n"
        "printf '#!/usr/bin/python3\\nimport sys\\nsys.path.insert(0, \"/opt/greet\")\\nimport greeting\\n"
        "greeting.say(sys.argv[1])\\n' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet",
    ),
    "greet-python-module": (
        GREET,
        f"mkdir -p {SITE}; echo 'say = lambda name: print(f\"Hello, {{name}}!\")' > {SITE}/greeting.py\n"
        "printf '#!/usr/bin/python3\\nimport sys, greeting\\ngreeting.say(sys.argv[1])\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-virtual-environment": (
        GREET,
        "/usr/bin/python3 -m venv --without-pip /opt/venv; D=$(ls -d /opt/venv/lib/python3*/site-packages)\n"
        "echo 'say = lambda name: print(f\"Hello, {name}!\")' > $D/greeting.py\n"
        "printf '#!/opt/venv/bin/python3\\nimport sys, greeting\\ngreeting.say(sys.argv[1])\\n' > /opt/greet\n"
        "chmod 755 /opt/greet; ln -s /opt/greet /usr/local/bin/greet",
    ),
    "greet-compiled": (
        GREET,
        "echo '#include <stdio.h>\nint main(int c, char **v) { printf(\"Hello, %s!\\n\", v[1]); return 0; }' > g.c\n"
        "cc -o /usr/local/bin/greet g.c",
    ),
    "greet-settings-in-etc": (
        GREET,
        "echo word=Hello > /etc/greet.conf\n"
        "printf '#!/bin/sh\\n. /etc/greet.conf\\necho \"$word, $1!\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-data-in-var": (
        GREET,
        "mkdir -p /var/lib/greet; echo Hello > /var/lib/greet/word\n"
        "printf '#!/bin/sh\\necho \"$(cat /var/lib/greet/word), $1!\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-data-in-share": (
        GREET,
        "mkdir -p /usr/local/share/greet; echo Hello > /usr/local/share/greet/word\n"
        "printf '#!/bin/sh\\necho \"$(cat /usr/local/share/greet/word), $1!\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-data-in-srv": (
        GREET,
        "mkdir -p /srv/greet; echo Hello > /srv/greet/word\n"
        "printf '#!/bin/sh\\necho \"$(cat /srv/greet/word), $1!\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-data-in-tmp": (
        GREET,
        "echo Hello > /tmp/word\n"
        "printf '#!/bin/sh\\necho \"$(cat /tmp/word), $1!\"\\n' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet",
    ),
    "greet-perl-module": (
        GREET,
        "D=/usr/local/share/perl/$(perl -e 'printf \"%vd\", $^V'); mkdir -p $D\n"
        "echo 'package Hello; sub say { print \"Hello, $_[0]!\\n\" } 1;' > $D/Hello.pm\n"
        "printf '#!/usr/bin/perl\\nuse Hello;\\nHello::say($ARGV[0]);\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "greet-node-module": (
        GREET,
        "mkdir -p /opt/greet/node_modules/hello; cd /opt/greet\n"
        "echo 'module.exports = n => console.log(`Hello, ${n}!`)' > node_modules/hello/index.js\n"
        "echo 'require(\"hello\")(process.argv[2])' > main.js\n"
        "printf '#!/bin/sh\\nexec node /opt/greet/main.js \"$@\"\\n' > /usr/local/bin/greet\n"
        "chmod 755 /usr/local/bin/greet",
    ),
    "module-local": (MODULE, f"mkdir -p {SITE}; printf '{SHAPES}' > {SITE}/shapes.py"),
    "module-package": (MODULE, f"mkdir -p {SITE}/shapes; printf '{SHAPES}' > {SITE}/shapes/__init__.py"),
    "module-debian": (MODULE, f"printf '{SHAPES}' > /usr/lib/python3/dist-packages/shapes.py"),
    "module-path-file": (
        MODULE,
        f"mkdir -p /opt/shapes {SITE}; printf '{SHAPES}' > /opt/shapes/shapes.py; echo /opt/shapes > {SITE}/shapes.pth",
    ),
    "module-path-file-home": (
        MODULE,
        f"mkdir -p ~/src {SITE}; printf '{SHAPES}' > ~/src/shapes.py; echo /root/src > {SITE}/own.pth",
    ),
    "module-user-site": (
        MODULE,
        "D=$(/usr/bin/python3 -m site --user-site); mkdir -p $D; " f"printf '{SHAPES}' > $D/shapes.py",
    ),
    "module-of-modules": (
        MODULE,
        f"mkdir -p {SITE}; printf '{SHAPES}' > {SITE}/plane.py; echo 'from plane import area' > {SITE}/shapes.py",
    ),
    "module-link": (
        MODULE,
        f"mkdir -p /opt/src/shapes {SITE}; printf '{SHAPES}' > /opt/src/shapes/__init__.py\n"
        f"ln -s /opt/src/shapes {SITE}/shapes",
    ),
    "library-local": (LIBRARY, f"{BUILD}libarea.so; cp libarea.so /usr/local/lib/; ldconfig"),
    "library-system": (
        LIBRARY,
        f"{BUILD}libarea.so; cp libarea.so $(dirname $(ls /usr/lib/*-linux-gnu*/libc.so.6 | head -1))/; ldconfig",
    ),
    "library-in-opt": (
        LIBRARY,
        f"{BUILD}libarea.so.1; mkdir -p /opt/area/lib; cp libarea.so /opt/area/lib/libarea.so.1\n"
        "ln -s /opt/area/lib/libarea.so.1 /usr/local/lib/libarea.so; echo /opt/area/lib > /etc/ld.so.conf.d/area.conf\n"
        "ldconfig",
    ),
    "library-with-versions": (
        LIBRARY,
        f"{BUILD}libarea.so.2; cp libarea.so /usr/local/lib/libarea.so.2.1; cd /usr/local/lib\n"
        "ln -s libarea.so.2.1 libarea.so.2; ln -s libarea.so.2 libarea.so; ldconfig",
    ),
    "answer": (ANSWER, "echo right > answer.txt"),
    "answer-link-to-home": (ANSWER, "echo right > ~/result.txt; ln -s ~/result.txt answer.txt"),
    "answer-link-to-opt": (ANSWER, "mkdir /opt/out; echo right > /opt/out/a; ln -s /opt/out/a answer.txt"),
    "answer-link-to-tmp": (ANSWER, "echo right > /tmp/result; ln -s /tmp/result answer.txt"),
    "answer-link-to-link": (ANSWER, "echo right > c; ln -s c b; ln -s b answer.txt"),
    "answer-in-linked-directory": (ANSWER, "mkdir ~/app; echo right > ~/app/answer.txt; rm -r /app; ln -s ~/app /app"),
    "answer-hard-link": (ANSWER, "echo right > copy.txt; ln copy.txt answer.txt"),
    "answer-and-hooks": (
        ANSWER,
        "git init -q; git config core.hooksPath hooks; mkdir hooks; printf '#!/bin/sh\\n' > hooks/pre-commit\n"
        "chmod 755 hooks/pre-commit; echo right > answer.txt",
    ),
    "answer-and-tests": (
        ANSWER,
        "echo right > answer.txt; echo 'import pytest' > conftest.py; echo 'def test(): pass' > test_a.py\n"
        "printf '[tool.pytest.ini_options]\\naddopts = \"-q\"\\n' > pyproject.toml",
    ),
    "answer-and-process": (ANSWER, "echo right > answer.txt; nohup sleep 1000 > /dev/null 2>&1 &"),
    "answer-and-options": (ANSWER, "echo right > answer.txt; touch ./-rf ./--help"),
    "answer-and-settings": (
        ANSWER,
        "git config --global user.name a; git config --global core.editor vi; echo a=b > ~/.npmrc\n"
        "mkdir -p ~/.config/tool; echo x > ~/.config/tool/x; echo right > answer.txt",
    ),
    "answer-and-compiled-files": (
        ANSWER,
        "echo 'print(\"right\")' > a.py; /usr/bin/python3 -c 'import a' > answer.txt; mkdir json; touch queue.py",
    ),
    "answer-by-new-program": (
        ANSWER,
        "printf '#!/bin/sh\\necho right\\n' > /usr/local/bin/rightly; chmod 755 /usr/local/bin/rightly\n"
        "rightly > answer.txt",
    ),
    "tests": (OWN_TESTS, CALC + "printf 'import sys\\nsys.path.insert(0, \"/app\")\\nimport calc\\n\\n\\n"
              "def test_it():\\n    assert calc.double(2) == 4\\n' > tests/test_calc.py"),
    "tests-conftest": (
        OWN_TESTS,
        CALC + "printf 'import pytest\\n\\n@pytest.fixture\\ndef two():\\n    return 2\\n' > tests/conftest.py\n"
        "printf 'def test_it(two):\\n    assert two == 2\\n' > tests/test_calc.py",
    ),
    "tests-conftest-above": (
        OWN_TESTS,
        CALC + "printf 'import sys\\nsys.path.insert(0, \"/app\")\\n' > conftest.py\n"
        "printf 'import calc\\n\\n\\ndef test_it():\\n    assert calc.double(2) == 4\\n' > tests/test_calc.py",
    ),
    "tests-pyproject": (
        OWN_TESTS,
        CALC + "printf '[tool.pytest.ini_options]\\npythonpath = [\".\"]\\n' > pyproject.toml\n"
        "printf 'import calc\\n\\n\\ndef test_it():\\n    assert calc.double(2) == 4\\n' > tests/test_calc.py",
    ),
    "tests-ini": (
        OWN_TESTS,
        CALC + "printf '[pytest]\\npythonpath = .\\npython_files = check_*.py\\n' > pytest.ini\n"
        "printf 'import calc\\n\\n\\ndef test_it():\\n    assert calc.double(2) == 4\\n' > tests/check_calc.py",
    ),
    "login-profile": (
        LOGIN,
        "mkdir -p /opt/r; printf '#!/bin/sh\\necho yes\\n' > /opt/r/ready; chmod 755 /opt/r/ready\n"
        "echo 'export PATH=$PATH:/opt/r' >> ~/.profile",
    ),
    "login-bash-profile": (
        LOGIN,
        "mkdir -p ~/r; printf '#!/bin/sh\\necho yes\\n' > ~/r/ready; chmod 755 ~/r/ready\n"
        "echo 'export PATH=$PATH:~/r' >> ~/.bash_profile",
    ),
    "login-system-profile": (
        LOGIN,
        "mkdir -p /opt/r; printf '#!/bin/sh\\necho yes\\n' > /opt/r/ready; chmod 755 /opt/r/ready\n"
        "echo 'export PATH=$PATH:/opt/r' >> /etc/profile",
    ),
    "login-program": (LOGIN, "printf '#!/bin/sh\\necho yes\\n' > /usr/local/bin/ready; chmod 755 /usr/local/bin/ready"),
    "interactive-system": (INTERACTIVE, "echo 'ready() { echo yes; }' >> /etc/bash.bashrc"),
    "interactive-home": (INTERACTIVE, "echo \"alias ready='echo yes'\" >> ~/.bashrc"),
    "server-module": (SERVER, f"echo page > page.txt; nohup {SERVE} /app > /dev/null 2>&1 &\n{WAIT}"),
    "server-in-opt": (SERVER, f"mkdir /opt/s; echo page > /opt/s/page.txt; setsid {SERVE} /opt/s > log 2>&1 &\n{WAIT}"),
    "server-program": (
        SERVER,
        "mkdir -p /srv/s; echo page > /srv/s/page.txt\n"
        f"printf '#!/bin/sh\\nexec {SERVE} /srv/s\\n' > /usr/local/bin/serve\n"
        f"chmod 755 /usr/local/bin/serve; nohup serve > /dev/null 2>&1 &\n{WAIT}",
    ),
    "hooks": (HOOKS, f"printf '{TODO}' > .git/hooks/pre-commit; chmod 755 .git/hooks/pre-commit"),
    "hooks-path": (
        HOOKS,
        f"mkdir .githooks; printf '{TODO}' > .githooks/pre-commit; chmod 755 .githooks/pre-commit\n"
        "git config core.hooksPath .githooks",
    ),
    "hooks-in-opt": (
        HOOKS,
        f"mkdir /opt/hooks; printf '{TODO}' > /opt/hooks/pre-commit; chmod 755 /opt/hooks/pre-commit\n"
        "git config core.hooksPath /opt/hooks",
    ),
    "hooks-of-user": (
        HOOKS,
        f"mkdir ~/hooks; printf '{TODO}' > ~/hooks/pre-commit; chmod 755 ~/hooks/pre-commit\n"
        "git config --global core.hooksPath ~/hooks",
    ),
}  # fmt: skip


def test_right_work_is_paid_wherever_it_lies(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    for name, (files, solve) in WORKS.items():
        task = copied(HARBOR / "word-counts", tmp_path, {**files, "solution/solve.sh": f"#!/bin/bash\n{solve}\n"})
        task.rename(tmp_path / name)
    found = played_all(tmp_path, installed_pytest, tmp_path.parent / "cache")
    assert found.keys() == WORKS.keys()
    verdicts = {name: (each.official, each.reward, each.error) for name, each in found.items()}
    assert {name: each for name, each in verdicts.items() if each != (1.0, 1.0, "")} == {}
