"""The proof of the rung `confined`: a throw-away slot tries to leave, by means that any command has.

A shell's builtins and redirections only, so that what is refused was refused by the kernel and not by a program; of
any shell, though only bash can try sockets.
"""

from __future__ import annotations

SCRIPT = r"""
while read -r key value effective _; do case $key in
NoNewPrivs:|Seccomp:|CapBnd:|CapEff:) echo "$key $value";; Uid:) echo "uid $effective";; esac
done < /proc/self/status
while read -r key value; do case $key in PPid:) server=$value;; esac; done < "/proc/$PPID/status"
kill -0 "$server" 2>/dev/null && echo "signals server"
kill -0 "$PPID" 2>/dev/null && echo "signals init"
( : > /etc/.palaestra-proof ) 2>/dev/null && echo "writes system"
( : > ../.proof ) 2>/dev/null && echo "writes beside"
( : < /etc/shadow ) 2>/dev/null && echo "reads shadow"
set -- /var/*; [ "$1" = "/var/*" ] || echo "reads var"
case "$( ( exec 3<>/dev/tcp/127.0.0.1/9 ) 2>&1 )" in *"not supported"*) echo "inet none";; esac
[ -n "$BASH_VERSION" ] || echo "inet untried"
: > .proof && echo "workspace writable"
"""


def claims(facts: dict[str, list[str]], server_is_root: bool) -> dict[str, bool]:
    """What must hold, named by what it is when it does not. `facts` are the words that the script wrote, by the first.

    Where the server is not root, a command can signal its own init, and a process keeps the bounding set it came with,
    from which `no new privileges` lets nothing be taken.
    """
    uid = facts.get("uid", [""])[0]
    bounding = facts.get("CapBnd:", ["1"]) if server_is_root else ["0"]
    return {
        "commands do not run": uid.isdigit(),
        "its user is root": uid != "0",
        "it can gain privileges": facts.get("NoNewPrivs:") == ["1"],
        "no system call filter": facts.get("Seccomp:") == ["2"],
        "it holds capabilities": all(int(word, 16) == 0 for word in (*bounding, *facts.get("CapEff:", ["1"]))),
        "it can signal the slot server": "server" not in facts.get("signals", []),
        "it can signal its init": not server_is_root or "init" not in facts.get("signals", []),
        "it can write outside its directories": "writes" not in facts,
        "it can read more than the system's programs": "reads" not in facts,
        "it has the internet's sockets": facts.get("inet") in (["none"], ["untried"]),
        "its workspace is not writable": facts.get("workspace") == ["writable"],
    }
