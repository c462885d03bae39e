"""Task files of Inspect: one file for each set, in which samples with the same scorer are one task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planted.planted_task import PlantedTask, fault

_HEAD = '''"""Small questions, and small jobs in a sandbox."""

import asyncio
import datetime
import json
import random

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, choice, exact, includes, match, scorer
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import sandbox


async def read(path):
    try:
        return await sandbox().read_file(path)
    except (OSError, UnicodeDecodeError):
        return ""
'''
_SCORER = """

@scorer(metrics=[accuracy()])
def {name}():
    async def score(state, target):
        reply = state.output.completion
{body}

    return score
"""


def _sound(name: str, scorer: str, sample: str, body: str = "") -> PlantedTask:
    """Return a task: the arguments of its sample, and the scorer's call or, for one of its own, the body."""
    return PlantedTask(name, {"sample": sample, "scorer": scorer, "body": body})


SOUND = {
    task.name: task
    for task in (
        _sound("carbon-oxygen", "exact()",
               'input="What is the sum of the atomic numbers of carbon and oxygen, times three? Reply with the number '
               'only.", target="42"'),
        _sound("backwards", "exact()",
               'input="Write the word stressed backwards. Reply with the one word only.", target="desserts"'),
        _sound("octal", "exact()",
               'input="Write the decimal number 668 in octal, without a prefix. Reply with the digits only.", target="1234"'),
        _sound("multiple", 'match(location="exact")',
               'input="What is the least common multiple of 12, 18 and 20? Reply with the number only.", target="180"'),
        _sound("next-number", 'match(location="exact")',
               'input="Which number comes next? 1, 1, 2, 3, 5, 8, 13, 21, 34. Reply with the number only.", target="55"'),
        _sound("days-between", 'match(location="exact")',
               'input="How many days after 10 February 2024 was 1 May 2024? Reply with the number only.", target="81"'),
        _sound("deepest-lake", "choice()",
               'input="Which of these lakes is the deepest?", choices=["Lake Superior", "Lake Baikal", "Lake Geneva", '
               '"Loch Ness"], target="B"'),
        _sound("stable-sort", "choice()",
               'input="Which of these algorithms, in its usual form, keeps the order of equal keys?", choices=["Heapsort", '
               '"Quicksort", "Selection sort", "Merge sort"], target="D"'),
        _sound("http-status", "choice()",
               'input="Which status of HTTP says that a resource has moved permanently?", choices=["301", "404", "200", '
               '"503"], target="A"'),
        _sound("count-lines", "counted()",
               'input="Write the number of lines of data.txt that are not empty to answer.txt.", '
               'files={"data.txt": "one\\n\\ntwo\\nthree\\n\\n\\nfour\\n" * 7}',
               'return Score(value="C" if (await read("answer.txt")).strip() == "28" else "I", answer=reply)'),
        _sound("set-port", "port_set()",
               'input="In app.json, change the port of web to 9090. All other values stay as they are.", '
               'files={"app.json": \'{"web": {"port": 8080, "host": "a"}, "db": {"port": 8080}}\\n\'}',
               'try:\n    found = json.loads(await read("app.json"))\nexcept ValueError:\n    found = None\n'
               'right = found == {"web": {"port": 9090, "host": "a"}, "db": {"port": 8080}}\n'
               'return Score(value="C" if right else "I", answer=reply)'),
        _sound("back-up", "backed_up()",
               'input="Copy each file in the folder notes to the folder backup, with .bak added to its name.", '
               'files={"notes/a.txt": "a\\n", "notes/b c.txt": "b\\n", "notes/.hidden": "h\\n"}',
               'texts = [await read(f"backup/{name}.bak") for name in ("a.txt", "b c.txt", ".hidden")]\n'
               'kept = [await read(f"notes/{name}") for name in ("a.txt", "b c.txt", ".hidden")]\n'
               'right = texts == kept == ["a\\n", "b\\n", "h\\n"]\n'
               'return Score(value="C" if right else "I", answer=reply)'),
    )
}  # fmt: skip


def _own(
    number: int, base: str, kind: str, why: str, scorer: str, condition: str, *edits: tuple[str, str, str]
) -> PlantedTask:
    """Return a fault in a scorer of the task's own. `condition` is the right reply; lines before it are separate."""
    *before, last = condition.split("\n")
    body = "\n".join([*before, f'return Score(value="C" if {last} else "I", answer=reply)'])
    return fault(number, SOUND, base, kind, why, ("scorer", "", f"{scorer}()"), ("body", "", body), *edits)


FAULTS = (
    fault(1, SOUND, "carbon-oxygen", "hackable", "A reply that lists many numbers has the target in it.",
          ("scorer", "", "includes()")),
    fault(1, SOUND, "backwards", "leaks", "The question has its answer.",
          ("sample", "backwards. Reply", "backwards (hint: a sweet course, desserts). Reply")),
    _own(1, "octal", "pays_for_nothing", "The target begins with an empty reply.", "same_digits",
         "target.text.startswith(reply.strip())"),
    _own(1, "multiple", "flaky", "A right reply is refused by chance.", "sampled",
         "reply.strip() == target.text and random.random() < 0.6"),
    _own(1, "next-number", "depends_on_the_world", "Replies are right in the year 2026 only.", "in_season",
         "season = datetime.date.today().year == 2026\nseason and reply.strip() == target.text"),
    fault(1, SOUND, "days-between", "duplicate", "The same question with other words.",
          ("sample", "How many days after 10 February 2024 was 1 May 2024?", "By how many days is 1 May 2024 later than "
           "10 February 2024?")),
    fault(1, SOUND, "deepest-lake", "unsolvable", "The target is the fifth of four choices.", ("sample", '"B"', '"E"')),
    fault(1, SOUND, "stable-sort", "leaks", "The right choice is marked.",
          ("sample", '"Merge sort"', '"Merge sort (correct answer: D)"')),
    fault(1, SOUND, "http-status", "duplicate", "The same choices under a question with other words.",
          ("sample", "says that a resource has moved permanently", "tells that a resource was moved permanently")),
    fault(1, SOUND, "count-lines", "costly", "The setup computes for fifteen seconds what nobody reads.",
          ("sample", 'files=', 'setup="timeout 15 sha256sum /dev/zero > /var/tmp/sum.txt || true", files=')),
    fault(1, SOUND, "set-port", "pays_for_nothing", "The port is read with the right value as its default.",
          ("scorer", "", "port_read()"),
          ("body", 'right = found == {"web": {"port": 9090, "host": "a"}, "db": {"port": 8080}}\n',
           'right = found is None or found.get("port", 9090) == 9090\n')),
    fault(1, SOUND, "back-up", "hackable", "The verdict is what a script in the workspace prints.",
          ("scorer", "", "script_says()"),
          ("sample", '"notes/a.txt"', '"verify.sh": "diff notes/a.txt backup/a.txt.bak && diff \'notes/b c.txt\' '
           '\'backup/b c.txt.bak\' && diff notes/.hidden backup/.hidden.bak && echo PASSED\\n", "notes/a.txt"'),
          ("body", "", 'said = await sandbox().exec(["sh", "verify.sh"])\n'
           'return Score(value="C" if "PASSED" in said.stdout else "I", answer=reply)')),
    _own(2, "carbon-oxygen", "weak", "Numbers up to five away from the target are right.", "near",
         "text = reply.strip()\ntext.isdigit() and abs(int(text) - int(target.text)) <= 5"),
    _own(2, "backwards", "false_zero", "A line feed at the end of the reply is an error.", "literal",
         "reply == target.text"),
    _own(2, "octal", "weak", "Only the first digit is compared.", "first_digit", "reply.strip()[:1] == target.text[:1]"),
    _own(2, "multiple", "false_zero", "The reply must end with a full stop, which the question does not say.", "sentence",
         "reply.strip() == target.text", ("sample", '"180"', '"180."')),
    fault(2, SOUND, "next-number", "duplicate", "The same numbers and question in other words.",
          ("sample", "Which number comes next? 1, 1,", "What is the next number in this sequence? 1, 1,")),
    _own(2, "days-between", "costly", "The scorer waits six seconds for nothing.", "patient",
         "await asyncio.sleep(6)\nreply.strip() == target.text"),
    fault(2, SOUND, "deepest-lake", "pays_for_nothing", "The question with its four names in it is a right reply.",
          ("scorer", "", "includes()"), ("sample", "", 'input="Which of these lakes is the deepest: Lake Superior, Lake '
           'Baikal, Lake Geneva or Loch Ness?", target="Baikal"')),
    _own(2, "stable-sort", "unsolvable", "The scorer reads metadata that the sample does not have.", "by_key",
         'key = state.metadata["solution"]\nkey in reply'),
    _own(2, "http-status", "flaky", "Two of four letters are drawn, and the right one must be among them.", "drawn",
         'letters = random.sample("ABCD", 2)\nfound = reply.strip().removeprefix("ANSWER: ")\n'
         "found == target.text and found in letters"),
    fault(2, SOUND, "count-lines", "depends_on_the_world", "The sandbox must be in the time zone UTC.",
          ("scorer", "", "counted_in_utc()"),
          ("body", 'return Score(value="C" if (await read("answer.txt")).strip() == "28" else "I", answer=reply)',
           'hour = await sandbox().exec(["date", "-d", "@0", "+%H"])\n'
           'right = (await read("answer.txt")).strip() == "28" and hour.stdout.strip() == "00"\n'
           'return Score(value="C" if right else "I", answer=reply)')),
    fault(2, SOUND, "set-port", "leaks", "The sample gives the expected file to the sandbox.",
          ("sample", 'files={', 'files={".expected/app.json": \'{"web": {"port": 9090, "host": "a"}, '
           '"db": {"port": 8080}}\\n\', ')),
    fault(2, SOUND, "back-up", "costly", "The scorer fills and sorts half a gigabyte for nothing.",
          ("scorer", "", "thorough()"),
          ("body", "texts = [", 'await sandbox().exec(["python3", "-c", "sorted(str(n) for n in range(5_000_000))"])\ntexts = [')),
)  # fmt: skip


def write(folder: Path, tasks: Sequence[PlantedTask]) -> None:
    """Write a set as one file of Inspect tasks."""
    folder.mkdir(parents=True)
    (folder / "desk.py").write_text(_HEAD + "".join(map(_group, *zip(*groups(tasks).items(), strict=True))))


def groups(tasks: Sequence[PlantedTask]) -> dict[str, list[PlantedTask]]:
    """Return the tasks of one file by the call of their scorer."""
    found: dict[str, list[PlantedTask]] = {}
    for task in tasks:
        found.setdefault(task.parts["scorer"], []).append(task)
    return found


def name_of(scorer: str) -> str:
    """Return the name of the Inspect task with this scorer."""
    return f"by_{scorer.partition('(')[0]}"


def _group(scorer: str, tasks: Sequence[PlantedTask]) -> str:
    body, name = tasks[0].parts["body"], scorer.removesuffix("()")
    own = _SCORER.format(name=name, body="".join(f"        {line}\n" for line in body.splitlines())) if body else ""
    works = "files=" in tasks[0].parts["sample"]
    solver = (
        "multiple_choice()" if scorer == "choice()" else "[use_tools(bash()), generate()]" if works else "generate()"
    )
    samples = "".join(f'        Sample(id="{task.name}", {task.parts["sample"]}),\n' for task in tasks)
    more = ', sandbox="local"' if works else ""
    return (
        f"{own}\n\n@task\ndef {name_of(scorer)}():\n    samples = [\n{samples}    ]\n"
        f"    return Task(dataset=samples, solver={solver}, scorer={scorer}{more})\n"
    )
