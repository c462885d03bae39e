"""Find the cause of a failed installation or test session in its output, as a short sentence.

A cause begins with a kind that a reader can act on: a missing package, a wrong Python, memory, the network, a missing
program. Patterns are tried in order, from the most certain one to guesses.
"""

from __future__ import annotations

import re

from palaestra_slots.sandbox.slot import ExecutionResult
from palaestra_suites.grading.log_parsers import lines_of

_RUNNERS_LIMIT = (
    r"((?:Timeout of|Exceeded timeout of|[Tt]est timed out (?:in|after)|execution timed out after) \d[\w.]*)|"
    r"(\*\*\*Timeout)|(Timed out while running tests)|/\d{1,9} \S+ +(TIMEOUT) |Timeout::Error: (execution expired)"
)
"""What mocha, jest, vitest, node, JUnit, Go, ctest, ava, meson and Ruby's Timeout print at their limits."""
_OUT_OF_MEMORY = "out of memory: raise the memory limit of the slots"
_CAUSES: tuple[tuple[str, str], ...] = tuple(
    (sentence, pattern)
    for sentence, patterns in (
        ("out of time: raise --env.install_timeout_s", (r"… failed: Command timed out after",)),
        (
            _OUT_OF_MEMORY,
            (r"JavaScript heap out of memory", r"\bMemoryError\b", r"Cannot allocate memory",
             r"virtual memory exhausted", r"Java heap space", r"cc1plus: out of memory", r"No space left on device",
             r"line \d+: +\d+ Killed\b"),
        ),
        (
            "no network: the tests or the installation need {}",
            (r"Could not resolve host:? (\S+)", r"lookup (\S+)(?: on \S+)?:",
             r"getaddrinfo (?:EAI_AGAIN|ENOTFOUND) (\S+)",
             r"host='([\w.-]+)'.*?(?:NameResolutionError|Failed to (?:resolve|establish))",
             r"Unknown host (\S+)", r"UnknownHostException: (\S+)",
             r"Temporary failure resolving '([^']+)'", r"unable to resolve host address [‘']([^’']+)",
             r"Failed to resolve '([^']+)'", r"Failed to connect to (\S+) port",
             r"error sending request for url \(https?://([^/)]+)", r"Could not resolve hostname \[([^]]+)\]",
             r"cannot open URL '\w+://([^/']+)"),
        ),
        (
            "no network: the certificate of {} is not trusted here",
            (r"host='([\w.-]+)'.*?(?:CERTIFICATE_VERIFY_FAILED|certificate verify failed)",
             r"request to https?://([^/\s]+)\S* failed, reason: (?:self.signed|unable to (?:get|verify))"),
        ),
        (
            "no network: a certificate is not trusted here",
            (r"CERTIFICATE_VERIFY_FAILED", r"SSL certificate problem: ", r"SELF_SIGNED_CERT_IN_CHAIN",
             r"invalid peer certificate", r"x509: certificate signed by unknown authority"),
        ),
        (
            "no network",
            (r"\bECONNRESET\b|\bETIMEDOUT\b",
             r"\bAPIConnectionError\b",
             r"Temporary failure in name resolution", r"Name or service not known", r"Network is unreachable",
             r"failed to (?:download|fetch) .*?registry", r"proxy\.golang\.org", r"download of config\.json failed"),
        ),
        (
            "the root's Python belongs to its distribution, and pip may not install for it: remove the file "
            "EXTERNALLY-MANAGED below usr/lib from a root that stands for a Python image",
            (r"externally-managed-environment",),
        ),
        (
            "wrong Python: {}",
            (r"requires a different Python: ([^\n]+)", r"(Package .* requires a different Python[^\n]*)",
             r"because the current Python version \(([^)]+)\) does not satisfy",
             r"(required field \"lineno\" missing)", r"(cannot import name '\w+' from 'collections')",
             r"(module 'collections' has no attribute '\w+')",
             r"(No module named '(?:distutils|imp|asyncore|cgi|pipes)')"),
        ),
        ("wrong version of a package: {}", (r"cannot import name '\w+' from '(\w+)[\w.]*' \([^)]*site-packages",)),
        ("wrong version of Node: {}", (r"Unsupported engine[^\n]*?(\{[^\n]*\})",)),
        (
            "missing package: {}",
            (r"No module named '([\w.]+)'", r"No module named ([\w.]+)$", r"Cannot find (?:module|package) '([^']+)'",
             r"no required module provides package (\S+?);", r"cannot find package \"([^\"]+)\"",
             r"unresolved import `([^`]+)`", r"no matching package named `([^`]+)`", r"package ([\w.]+) does not exist",
             r"Unmet dependencies|cannot load such file -- (\S+)", r"Class \"([\w\\]+)\" not found",
             r"Could not find gem '([^']+)'", r"the artifact (\S+) has not been downloaded",
             r"Could not find a package configuration file provided by \"([^\"]+)\""),
        ),
        ("missing header: {}", (r"fatal error: (\S+?\.h(?:pp)?): No such file",)),
        ("missing pytest plugin: fixture {}", (r"fixture '(\w+)' not found",)),
        ("missing pytest plugin: marker {}", (r"'(\w+)' not found in `markers`",)),
        ("missing pytest plugin: option {}", (r"unrecognized arguments: (\S+)", r"no such option: (\S+)")),
        (
            "missing program: {}",
            (r"(?:bash|sh): (?:line \d+: )?(?:\d+: )?([\w./-]+): (?:command )?not found",
             r"error: command '([\w./+-]+)' failed: No such file", r"/usr/bin/env: ‘?'?([\w.-]+)"),
        ),
        ("out of time: a limit of the tests or their runner ended a test ({})", (_RUNNERS_LIMIT,)),
        (
            "no such version: {}",
            (r"No matching distribution found for ([^\n]+)", r"No solution found[^\n]*\n[^\n]*?Because ([^\n]+)",
             r"E: (Version '[^']+' for '[^']+') was not found", r"E: Unable to locate package (\S+)"),
        ),
    )
    for pattern in patterns
)  # fmt: skip
_KILLED = 137
_LOOPBACK = re.compile(r"localhost|127(?:\.\d+){3}|\[?::1\]?|0\.0\.0\.0")


def cause_of(output: str, exit_code: int | None = None, *, exceeded: str = "") -> str:
    """Return the cause of a failure in one line, or an empty string if the output does not show it. `exceeded` names
    the setting whose time limit ended the command, if one did."""
    if exceeded:
        return f"out of time: raise --env.{exceeded}"
    output = "\n".join(lines_of(output))
    for sentence, pattern in _CAUSES:
        if re.search(pattern, output, re.MULTILINE) is not None:
            if "{}" not in sentence:
                return sentence
            names = [found for each in re.finditer(pattern, output, re.MULTILINE) for found in each.groups() if found]
            first = list(dict.fromkeys(name.strip().rstrip(".,;:") for name in names))[:5]
            if first and all(map(_LOOPBACK.fullmatch, first)):
                continue  # a service of the slot itself, which does not run
            return sentence.format(", ".join(first)[:300]) if first else sentence.partition(":")[0]
    return _OUT_OF_MEMORY if exit_code == _KILLED else ""


def exceeds_limit_of_runner(log: str) -> bool:
    """Return whether the log of a test runner shows a test that exceeded a time limit of the runner or of its own."""
    return any(re.search(_RUNNERS_LIMIT, line) for line in lines_of(log))


def cause_of_install(result: ExecutionResult) -> str:
    """Return the cause of a failed installation, or an empty string."""
    if result.metadata.get("oom"):
        return _OUT_OF_MEMORY
    exceeded = "install_timeout_s" if result.metadata.get("timeout") else ""
    return cause_of(result.output, result.exit_code, exceeded=exceeded)
