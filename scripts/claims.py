"""Runs the attacks behind the claims of docs/reference/attacks.md, stores their results, and writes the page's tables.

    .venv/bin/python scripts/claims.py run      # runs the attacks, which takes minutes and needs root
    .venv/bin/python scripts/claims.py write    # only writes the tables from the stored results

A claim holds at an isolation level if each of its tests promises protection at this level (`contained_on`) and has
passed. A test in `tests/docs/` compares the page, the stored results and the tests.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS, SUITE = ROOT / "docs/reference/attacks.md", ROOT / "tests/abuse/results.json", "tests/abuse"
BEGIN, END = "<!-- claims: written by scripts/claims.py -->", "<!-- end of claims -->"
LEVELS = ("full", "userns", "confined")

# Each claim about slots, with the tests in `tests/abuse` that attack it, written as file:part of the test's name.
SLOTS: dict[str, tuple[str, ...]] = {
    "the host's files, accounts and settings": (
        "files:links_lead_nowhere", "files:system_is_written", "network:accounts_of_the_host",
        "kernel:settings_of_the_machine", "kernel:clock_and_the_name", "kernel:no_descriptor_leads_out",
    ),
    "the host's paths in /proc": ("output:paths_of_the_host",),
    "privileges, namespaces, devices": (
        "kernel:no_way_makes_a_namespace", "files:set_user_program", "files:devices_are_not_made",
        "kernel:calls_outside_the_contract", "kernel:foreign_call_tables", "kernel:no_key_is_typed",
        "files:no_core_is_dumped", "kernel:crash_starts_no_program",
    ),
    "other processes": (
        "processes:killing_everything", "processes:first_process_cannot_be_read", "processes:program_of_pid_1",
        "kernel:nothing_is_taken", "kernel:priorities_of_others", "processes:end_of_the_first_process",
    ),
    "sockets that no namespace contains": (
        "kernel:sockets_that_no_namespace", "kernel:netlink_carries_nothing", "kernel:no_protocol_loads",
    ),
    "the network when it is off": (
        "network:nothing_outside", "network:no_interface", "network:names_of_sockets", "network:services_with_a_path",
    ),
    "this machine and other slots with the network on": (
        "network:host_is_out_of_reach", "network:datagrams_do_not_reach", "network:slots_with_the_network_on",
        "network:flood_of_packets",
    ),
    "cloud metadata with the network on": ("network:metadata_addresses",),
    "the limit on processes and threads": ("processes:fork_bomb", "processes:threads_count"),
    "memory of one process": ("processes:one_greedy_process",),
    "memory of all processes and files together": (
        "processes:many_processes_share", "processes:memory_taken_as_files", "processes:memory_that_no_process",
    ),
    "processor time": ("processes:busy_loop",),
    "disk, inodes, extended attributes": ("files:full_disk", "files:inodes_run_out", "files:extended_attributes"),
    "counters per user: open files, inotify instances, AIO, queues, keys, fanotify, larger pipes, sockets, locks": (
        "counters:inotify_instances", "counters:queues_asynchronous", "counters:processes_and_sockets",
        "counters:locks_and_leases", "kernel:descriptors_run_out",
    ),
    "huge pages and System V objects": ("counters:huge_pages", "counters:segments_and_semaphores"),
    "memory of System V segments": ("processes:segments_of_shared_memory",),
    "memory in TCP connections and UDP sockets": ("processes:data_on_its_way",),
    "memory of socket filters": ("kernel:no_filter",),
    "counters per user: queued signals, inotify watches": ("counters:queued_signals", "counters:watches"),
    "pipes and terminals of a neighbour": ("counters:pipes_of_a_neighbour", "counters:terminals"),
    "the page cache": ("remains:page_cache", "remains:interpreter_belongs"),
    "locks, watches and times of shared files": (
        "remains:lock_on_a_shared_file", "remains:watch_sees_no_other", "remains:read_leaves_no_time",
        "remains:lock_on_a_device", "remains:watch_on_a_device",
    ),
    "machine-wide counters in /proc": ("remains:counters_of_the_machine", "remains:no_number_of_proc"),
    "traces of an earlier lease": ("files:nothing_of_one_lease", "output:former_holder"),
    "processes that outlive a call, a timeout, a freeze or a seal": (
        "processes:timeout_takes_what", "processes:timeout_takes_a_process", "processes:detached_process",
        "processes:family_without_main_threads",
        "processes:main_thread_freezes", "processes:forks_away", "processes:daemon_holds",
        "processes:stopped_or_traced", "processes:thread_that_starts_programs", "processes:waits_for_a_child_of_vfork",
        "processes:orphans", "processes:process_is_gone_before",
        "processes:no_name_of_a_process", "processes:in_whatever_it_becomes",
    ),
    "file calls: links, races, fifos, claimed sizes, depth": (
        "files:race_of_links", "files:what_is_not_a_file", "files:claims_to_be_huge", "files:path_too_deep",
    ),
    "limits on output, and binary output": (
        "output:flood_is_counted", "output:flood_does_not_delay", "output:bytes_that_are_no_text",
        "output:commands_longer", "output:verdict_without_end",
    ),
    "secrets and descriptors of the server in a command": ("output:no_secret", "output:no_descriptor_of_ours"),
    "the verdict channel after its holder has closed it": ("output:verdict_is_not", "output:verdict_channel"),
}  # fmt: skip

# Claims about the host's own programs, with test files or single tests (file::test).
HOST: dict[str, tuple[str, ...]] = {
    "archives, image folders and files of tasks": (
        "tests/abuse/test_archives.py",
        "packages/slots/tests/sandbox/images",
    ),
    "a run's folder that chooses code, isolation or files": (
        "tests/cli/test_replay.py::test_a_recording_chooses_no_code_and_no_isolation",
        "tests/cli/test_replay.py::test_a_recording_chooses_no_file_to_write",
        "tests/cli/test_replay.py::test_a_folder_with_links_is_not_resumed",
        "tests/cli/test_replay.py::test_a_resumed_run_starts_and_reaches_nothing_that_its_folder_names",
        "tests/cli/test_replay.py::test_a_foreign_run_of_an_installed_environment_chooses_no_server",
        "tests/cli/test_replay.py::test_the_files_of_a_run_are_for_its_owner_alone",
        "packages/palaestra/tests/cli/test_foreign_runs.py",
    ),
    "servers: the token before the body, requests from foreign pages, limits": ("tests/core/io/test_http_server.py",),
    "cloud metadata addresses": ("packages/palaestra/tests/tools/net/test_host_policy.py",),
    "DNS answers and redirects to this machine": ("tests/tools/net/test_dns_answers.py",),
    "secrets in written text, and keys on command lines": (
        "tests/core/test_redaction.py", "packages/slots/tests/core/io/test_process_arguments.py",
    ),
    "control tokens from users, tools and their schemas": (
        "packages/tokens/tests/templates/test_turn_renderer.py::test_control_tokens_of_users_and_tools_are_text",
        "packages/tokens/tests/templates/test_turn_renderer.py::test_control_tokens_of_tool_schemas_are_text",
        "packages/tokens/tests/templates/test_control_text.py",
    ),
    "control characters on a terminal": ("tests/core/test_printable.py",),
}  # fmt: skip

Results = dict[str, dict[str, list[int]]]
"""By claim and level (`host` for claims about the host): the number of attacks that failed, and the number of attacks
that ran."""


@functools.cache
def promises() -> dict[str, tuple[str, ...]]:
    """Return the levels at which each attack on a slot must fail, by `file:test`."""
    found = {}
    for path in sorted((ROOT / SUITE).glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "contained_on":
                    levels = tuple(ast.literal_eval(each) for each in decorator.args)
                    assert isinstance(node, ast.FunctionDef)
                    found[f"{path.stem.removeprefix('test_')}:{node.name.removeprefix('test_')}"] = levels
    return found


def tests_of(claim: str) -> list[str]:
    """Return the attacks on a slot behind a claim. Raises ValueError if a part of a name does not match exactly one
    test."""
    found = []
    for wanted in SLOTS[claim]:
        file, _, part = wanted.partition(":")
        fitting = [name for name in promises() if name.startswith(f"{file}:") and part in name]
        if len(fitting) != 1:
            raise ValueError(f"{wanted} must match exactly one test, but matches {fitting or 'none'}")
        found += fitting
    return found


def run() -> Results:
    """Run all attacks, and return their results. A failed test counts as an attack that succeeded."""
    promised, results = promises(), {}
    slots = _outcomes([SUITE, "--deselect", f"{SUITE}/test_unprivileged.py"])
    for claim in SLOTS:
        results[claim] = {level: _count(tests_of(claim), level, promised, slots) for level in LEVELS}
    for claim, places in HOST.items():
        passed = list(_outcomes(list(places)).values())
        results[claim] = {"host": [sum(each for each in passed if each), len(passed)]}
    return results


def _count(tests: list[str], level: str, promised: dict[str, tuple[str, ...]], outcomes: dict[str, bool]) -> list[int]:
    ran = {name: [passed for case, passed in outcomes.items() if _is_at(case, name, level)] for name in tests}
    held = [level in promised[name] and all(cases) for name, cases in ran.items() if cases]
    return [sum(held), len(held)]


def _is_at(case: str, name: str, level: str) -> bool:
    """Return whether a case belongs to the test with this name, at this level, with or without further parameters."""
    test, _, parameters = case.removesuffix("]").partition("[")
    return test == name and level in parameters.split("-")


def _outcomes(arguments: list[str]) -> dict[str, bool]:
    """Return whether each test passed, by `file:test[parameters]`; skipped tests are left out."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        subprocess.run(argv, cwd=ROOT, check=False, stdout=sys.stderr)
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.attrib["classname"].rpartition(".")[2].removeprefix("test_")
            if case.find("skipped") is None:
                failed = case.find("failure") is not None or case.find("error") is not None
                found[f"{file}:{case.attrib['name'].removeprefix('test_')}"] = not failed
        return found


def table(results: Results) -> str:
    """Return the page's tables."""
    lines = ["| attacks on | `full` | `userns` | `confined` |", "|---|---|---|---|"]
    for claim in SLOTS:
        cells = [_cell(*results[claim][level]) for level in LEVELS]
        lines.append(f"| {claim} | {' | '.join(cells)} |")
    lines += ["", "| attacks on the host's own programs | held | tests |", "|---|---|---|"]
    for claim, places in HOST.items():
        where = ", ".join(f"`{place}`" for place in dict.fromkeys(each.partition("::")[0] for each in places))
        lines.append(f"| {claim} | {_cell(*results[claim]['host'])} | {where} |")
    return "\n".join(lines)


def _cell(held: int, ran: int) -> str:
    if ran == 0:
        return "not run"
    return f"yes ({ran})" if held == ran else "**no**" if held == 0 else f"{held} of {ran}"


def page(text: str, results: Results) -> str:
    """Return the page with the tables between its markers."""
    return re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{table(results)}\n{END}", text, flags=re.DOTALL)


def main() -> None:
    """Run the attacks if requested, and write the page."""
    if sys.argv[1:] == ["run"]:
        RESULTS.write_text(json.dumps(run(), indent=1) + "\n", encoding="utf-8")
    elif sys.argv[1:] != ["write"]:
        raise SystemExit(__doc__)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
