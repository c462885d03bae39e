"""The directories of servers that begin and end at the same time, as plain directories: the locks are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BEGIN_AND_END = """
import sys
from palaestra_slots.sandbox.slotd.namespaced import cgroups
hierarchies = [cgroups.Hierarchy(1, ("memory", "pids"), sys.argv[1] + "/groups")]
for number in range(300):
    group = cgroups.ServerCgroup(hierarchies, f"{sys.argv[2]}-{number}")
    group.create()
    assert group.remove()
    cgroups.sweep(hierarchies)
"""


def test_servers_that_begin_and_end_together_keep_out_of_each_others_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN_AND_END, str(tmp_path)]
    servers = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(4)]
    assert [server.communicate(timeout=100)[1] for server in servers] == [""] * 4
    assert list(tmp_path.iterdir()) == []
