"""Text that an agent may print to make the host's code over it slow: 1 MB, in one line, in lines as long as a reader of
logs keeps them, and in many short lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

SIZE = 1_000_000
MOST_CPU_S = 2.0
"""A bound, and no measurement: linear code needs some hundredths of a second, quadratic code some seconds."""
_LINE = 4000

_REPEATED = (
    " ", "\t", "1", "a", "(", "[", ")", ":", ".", "=", "'", '"', "#", ">", "\r", "\x1b", "\x1b[", "\x1b[1m", "ok 1 ",
    "1 ms ", " (1 ms", "( ", " (", ". =", ". = .", " = 1", "- ", " ( )", "[ OK ] ( ", "[   ", "a:b:", "::", "1/1 a ",
    "not found ", "python ", "pytest python3 not found", "Timeout of ", "host='a' ", "✔ ", "  1) Error ", "a > ",
    "<testsuite>", "<testcase>", "<doctest><TestCase><SubCase>", '"Action":"pass"', '"Test":"', "\\", "Chrome 1 (a) ",
    " (PENDING: ", "Tests run: 1, ", "-Dtest=", "PASSED ", "é", "\x00", "\udc80", "@", "//", "a@b:", "https://", "{",
    "```", "<a", "password=", "<tool_call>", "</tool_call>", "<think>", "\\\"", "$(", "-----BEGIN PRIVATE ",
)  # fmt: skip
_BEFORE = (
    "",
    "✔ a",
    "--- PASS: a",
    "[ok]: a",
    "1/2 Test #1: a",
    "test a",
    "  1) a",
    "Calc#",
    "PASS a",
    "a > ",
    "Error: ",
)


def hostile_texts() -> Iterator[str]:
    """Yield texts of up to 1 MB: each part as one line, and as lines of 4,000 characters with each beginning."""
    for part in _REPEATED:
        yield part * (SIZE // len(part)) if part.strip() else part * (SIZE // 10)
        yield "".join(f"{before}{part * (_LINE // len(part))}\n" for before in _BEFORE) * 2
    yield "".join(f"{' ' * (depth % 2000)}a{depth}\n" for depth in range(SIZE // 1000))
    for line in ("a\n", "  ✔ a\n", "ok 1 a\n", " \n"):
        yield line * (SIZE // len(line) // 8)
    tag = "<TestCase name='a'><SubCase name='b'>"
    yield "<doctest>" + tag * (SIZE // 100) + "</SubCase></TestCase>" * (SIZE // 100) + "</doctest>"
    yield "<testsuite>" + "<testcase>" * (SIZE // 25) + "</testcase>" * (SIZE // 25) + "</testsuite>"
    yield "Starting browser\n" + "".join(f"{' ' * (9 - depth % 9)}a\n" for depth in range(SIZE // 30))


def slowest(read: Callable[[str], object]) -> tuple[float, str]:
    """Return the CPU seconds of the text that `read` takes longest for, with the beginning of this text. Ends at the
    first text that takes too long."""
    worst = (0.0, "")
    for text in hostile_texts():
        start = time.thread_time()
        read(text)
        worst = max(worst, (time.thread_time() - start, repr(text[:60])))
        if worst[0] > MOST_CPU_S:
            break
    return worst
