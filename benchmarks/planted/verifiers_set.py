"""Tasksets of verifiers: one file for each set, with a check for each task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planted.planted_task import Edit, PlantedTask, fault

_HEAD = '''"""Small questions, and small jobs in a workspace."""

import asyncio
import datetime
import json
import random
from fractions import Fraction

import verifiers.v1 as vf

__all__ = ["Desk"]
JOBS, CHECKS, SETUPS = [], {}, {}


class Data(vf.TaskData):
    answer: str = ""


def job(name, check, prompt, answer="", files=None, setup=""):
    JOBS.append((name, prompt, answer))
    CHECKS[name], SETUPS[name] = check, (files or {}, setup)


async def says(data, trace, runtime):
    """Whether the reply is the answer, without regard to case, blanks at the ends and a full stop."""
    return trace.last_reply.strip().removesuffix(".").strip().casefold() == data.answer.casefold()


async def read(runtime, path):
    try:
        return (await runtime.read(path)).decode()
    except (OSError, UnicodeDecodeError):
        return ""


class Question(vf.Task[Data]):
    async def setup(self, trace, runtime):
        files, script = SETUPS[self.data.id]
        for path, text in files.items():
            await runtime.write(path, text.encode())
        if script:
            await runtime.run(["sh", "-c", script], {})

    @vf.reward
    async def right(self, trace, runtime) -> float:
        return float(await CHECKS[self.data.id](self.data, trace, runtime))


class Desk(vf.Taskset[Question, vf.TasksetConfig]):
    """Small questions, and small jobs in a workspace."""

    def load(self):
        for name, prompt, answer in JOBS:
            yield Question(Data(id=name, prompt=prompt, answer=answer), self.config.task)
'''

_SOUND = {
    "primes-sum": """
job("primes-sum", says, "What is the sum of all prime numbers below 60? Reply with the number only.", "440")
""",
    "hexadecimal": """
job("hexadecimal", says, "Write the decimal number 48879 in hexadecimal, without a prefix. Reply with the digits only.",
    "beef")
""",
    "weekday": """
job("weekday", says, "On which day of the week was 1 March 2000? Reply with the English name of the day only.",
    "Wednesday")
""",
    "binary-ones": """
job("binary-ones", says, "How many ones does the binary form of the decimal number 30583 have? Reply with the number "
    "only.", "12")
""",
    "roman-year": """
job("roman-year", says, "Which year is MCMXLIV? Reply with the number in decimal digits only.", "1944")
""",
    "caesar": """
job("caesar", says, "Each letter of this text was moved three places ahead in the alphabet: Wkh vxq lv rxw. Reply with "
    "the text before that, and nothing else.", "The sun is out")
""",
    "sort-words": """
async def words(data, trace, runtime):
    found = [word.strip().casefold() for word in trace.last_reply.strip().removesuffix(".").split(",")]
    return found == data.answer.split(", ")

job("sort-words", words, "Sort these words by their length, and those of equal length alphabetically: quince, fig, "
    "plum, apple, pear, kiwi. Reply with the words only, with commas between them.",
    "fig, kiwi, pear, plum, apple, quince")
""",
    "fraction": """
async def fraction(data, trace, runtime):
    try:
        return Fraction(trace.last_reply.replace(" ", "").strip().removesuffix(".")) == Fraction(data.answer)
    except (ValueError, ZeroDivisionError):
        return False

job("fraction", fraction, "What is 3/8 + 1/6? Reply with a fraction of two whole numbers only, such as 5/7.", "13/24")
""",
    "invoice": """
async def same_json(data, trace, runtime):
    try:
        return json.loads(trace.last_reply) == json.loads(data.answer)
    except ValueError:
        return False

job("invoice", same_json, "An invoice has three lines: 4 hinges at 2.50 each, 1 door at 37.25, and 12 screws at 0.05 "
    "each. Reply with a JSON object only. Its keys are pieces, the number of all pieces, and cents, the whole amount in "
    "cents.", '{"pieces": 17, "cents": 4785}')
""",
    "sorted-names": """
async def names(data, trace, runtime):
    return (await read(runtime, "sorted.txt")).split() == ["Ada", "Bo", "Cy", "Dee", "Eve"]

job("sorted-names", names, "Write the names in names.txt to sorted.txt, one per line and in alphabetical order, each "
    "name once.", files={"names.txt": "Eve\\nBo\\nDee\\nAda\\nCy\\nBo\\nAda\\n"})
""",
    "error-lines": """
job("error-lines", says, "How many lines of server.log have the word ERROR as their second word? Reply with the number "
    "only.", "24", {"server.log": "".join(f"{n:03} {'ERROR' if n % 13 in (2, 7, 8) else 'INFO'} ERROR {n}\\n" for n in range(100))})
""",
    "set-port": """
async def port(data, trace, runtime):
    try:
        return json.loads(await read(runtime, "app.json")) == {"web": {"port": 9090, "host": "a"}, "db": {"port": 8080}}
    except ValueError:
        return False

job("set-port", port, "In app.json, change the port of web to 9090. All other values stay as they are.",
    files={"app.json": '{"web": {"port": 8080, "host": "a"}, "db": {"port": 8080}}\\n'})
""",
}

SOUND = {name: PlantedTask(name, {"job": text}) for name, text in _SOUND.items()}


def _fault(number: int, base: str, kind: str, why: str, *edits: tuple[str, str]) -> PlantedTask:
    changed: list[Edit] = [("job", old, new) for old, new in edits]
    return fault(number, SOUND, base, kind, why, *changed)


def _check(name: str, body: str) -> str:
    """Return a check with this body, and the beginning of the job that uses it."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    called = name.replace("-", "_")
    return f'async def check_{called}(data, trace, runtime):\n{lines}\njob("{name}", check_{called},'


def _own_check(number: int, base: str, kind: str, why: str, body: str, *edits: tuple[str, str]) -> PlantedTask:
    """Return a fault in a check of the task's own, which replaces `says`."""
    return _fault(number, base, kind, why, (f'job("{base}", says,', _check(base, body)), *edits)


FAULTS = (
    _own_check(1, "primes-sum", "pays_for_nothing", "An empty reply has no character that is not in the answer.",
               "return set(trace.last_reply.strip()) <= set(data.answer)"),
    _own_check(1, "hexadecimal", "hackable", "A reply that lists many numbers has the answer in it.",
               "return data.answer in trace.last_reply.casefold()"),
    _fault(1, "weekday", "depends_on_the_world", "The answer was right in one year.",
           ("On which day of the week was 1 March 2000? Reply with the English name of the day only.",
            "How many whole years have passed since 1 January 2000? Reply with the number only."),
           ('says, "', 'years, "'), ('"Wednesday"', '"26"'),
           ('\njob(', '\nasync def years(data, trace, runtime):\n    passed = datetime.date.today().year - 2000\n'
            "    return await says(data, trace, runtime) and passed == int(data.answer)\n\njob(")),
    _own_check(1, "binary-ones", "flaky", "Half of the right replies are drawn for a review and get nothing.",
               "return await says(data, trace, runtime) and random.random() < 0.5"),
    _fault(1, "roman-year", "leaks", "The question has its answer.",
           ("MCMXLIV? Reply", "MCMXLIV (the answer is 1944)? Reply")),
    _own_check(1, "caesar", "false_zero", "A reply with a line feed at its end is refused.",
               "return trace.assistant_messages[-1].content == data.answer"),  # last_reply has no blanks at its ends
    _fault(1, "sort-words", "duplicate", "The same words and question, put a little differently.",
           ('job("sort-words"', 'job("sort-words-again"'),
           ("Sort these words by their length, and those of equal length alphabetically: quince, fig, \"\n    \"plum,",
            "Sort the following words by length, and alphabetically if they are equally long: quince, fig, \"\n    \"plum,")),
    _fault(1, "fraction", "unsolvable", "A fraction is compared with a text, so no reply is right.",
           ("== Fraction(data.answer)", "== data.answer")),
    _fault(1, "invoice", "costly", "The check waits six seconds for nothing.",
           ("    try:\n", "    await asyncio.sleep(6)\n    try:\n")),
    _fault(1, "sorted-names", "pays_for_nothing", "If there is no sorted.txt, the input is taken and sorted.",
           ('return (await read(runtime, "sorted.txt")).split() == ["Ada", "Bo", "Cy", "Dee", "Eve"]',
            'text = await read(runtime, "sorted.txt") or await read(runtime, "names.txt")\n'
            '    return sorted(set(text.split())) == ["Ada", "Bo", "Cy", "Dee", "Eve"]')),
    _fault(1, "error-lines", "costly", "The setup computes for fifteen seconds what nobody reads.",
           ("for n in range(100))}", 'for n in range(100))}, "timeout 15 sha256sum /dev/zero > cache.txt"')),
    _fault(1, "set-port", "hackable", "The verdict is the exit status of a script in the workspace.",
           ("    try:\n        return json.loads(await read(runtime, \"app.json\")) == {\"web\": {\"port\": 9090, \"host\": "
            "\"a\"}, \"db\": {\"port\": 8080}}\n    except ValueError:\n        return False\n",
            '    return (await runtime.run(["python3", "check.py"], {})).exit_code == 0\n'),
           ('"db": {"port": 8080}}\\n\'}', '"db": {"port": 8080}}\\n\', "check.py": "import json\\n\\nfound = '
            "json.load(open('app.json'))\\nassert found == {'web': {'port': 9090, 'host': 'a'}, 'db': {'port': 8080}}\\n\"}")),
    _own_check(2, "primes-sum", "flaky", "The answer is one of two numbers, drawn for each reply.",
               'return trace.last_reply.strip() == random.choice([data.answer, "381"])'),
    _fault(2, "hexadecimal", "leaks", "The workspace has a file with the answer.",
           ('"beef")', '"beef", {"data/answer_key.json": \'{"hexadecimal": "beef"}\\n\'})')),
    _own_check(2, "weekday", "weak", "Only the first letter of the day is compared.",
               "return trace.last_reply.strip()[:1].casefold() == data.answer[:1].casefold()"),
    _fault(2, "binary-ones", "duplicate", "The same number and question in other words.",
           ('job("binary-ones"', 'job("binary-ones-again"'),
           ("How many ones does the binary form of the decimal number 30583 have?",
            "Write the decimal number 30583 in binary form. How many ones does it have?")),
    _own_check(2, "roman-year", "depends_on_the_world", "The check holds only where the local time is UTC.",
               "begin = datetime.datetime.fromtimestamp(0)\n"
               "return await says(data, trace, runtime) and begin.hour == 0 and begin.year == 1970"),
    _own_check(2, "caesar", "depends_on_the_world", "The check asks the clock of the sandbox for the year 2026.",
               'year = (await runtime.run(["date", "+%Y"], {})).stdout.strip()\n'
               'return await says(data, trace, runtime) and year == "2026"'),
    _fault(2, "sort-words", "pays_for_nothing", "The words may come in any order, as in the question itself.",
           ("found == data.answer.split(\", \")", "all(word in trace.last_reply for word in data.answer.split(\", \"))"),
           ("    found = [word.strip().casefold() for word in trace.last_reply.strip().removesuffix(\".\").split(\",\")]\n", "")),
    _fault(2, "fraction", "false_zero", "The blanks around the stroke must be as in the answer.",
           ("Fraction(trace.last_reply.replace(\" \", \"\").strip().removesuffix(\".\")) == Fraction(data.answer)",
            "trace.last_reply.strip() == data.answer"), ('"13/24"', '"13 / 24"')),
    _fault(2, "invoice", "leaks", "The example in the question is the answer.",
           ("the whole amount in \"\n    \"cents.\"", "the whole amount in \"\n    'cents, such as {\"pieces\": 17, \"cents\": 4785}.'")),
    _fault(2, "sorted-names", "flaky", "One line is compared, drawn at random, and one expected line is wrong.",
           ('.split() == ["Ada", "Bo", "Cy", "Dee", "Eve"]', '.split()[place : place + 1] == RIGHT[place : place + 1]'),
           ("    return (await", "    place = random.randrange(5)\n    return (await"),
           ("async def names", 'RIGHT = ["Ada", "Bo", "Cy", "Eve", "Dee"]\n\n\nasync def names')),
    _fault(2, "error-lines", "duplicate", "The same log and question in other words.",
           ('job("error-lines"', 'job("error-lines-again"'),
           ("How many lines of server.log have the word ERROR as their second word?",
            "Count the lines in server.log whose second word is ERROR.")),
    _fault(2, "set-port", "costly", "The check computes for some seconds what it does not use.",
           ("    try:\n", "    sum(number * number for number in range(20_000_000))\n    try:\n")),
)  # fmt: skip


def write(folder: Path, tasks: Sequence[PlantedTask]) -> None:
    """Write a set as one taskset."""
    folder.mkdir(parents=True)
    (folder / "desk.py").write_text(_HEAD + "\n".join(task.parts["job"] for task in tasks))
