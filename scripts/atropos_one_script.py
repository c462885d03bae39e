"""Run one script of the Atropos repository up to a stage, and print what happened as JSON. `atropos_sweep.py` calls it.

It runs under Palaestra's interpreter and under one that has atroposlib, so it imports neither before `--side` is read.
Packages that are not installed, and the `datasets` package, are replaced by stand-ins for the script's own imports
only: every attribute exists, and a data set has rows in which every column is the text `3`. A file of the checkout that
is absent, because its author did not publish it, reads as such a data set, and so does any address. `VALUES` holds what
scripts demand of a package beyond that, and `FILES` the files that they look for in the folder they run in.
"""

from __future__ import annotations

import argparse
import asyncio
import builtins
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

STAGES = ("load", "class", "config", "init", "setup", "item", "play")


class Text(str):
    """A cell of a stand-in row: text that also has every key, because cells may be nested."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return Text("3") if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return Text("3")

    def __ge__(self, other: Any) -> bool:
        return super().__ge__(other) if isinstance(other, str) else True


CONVERSATIONS = frozenset({"messages", "conversation"})
CALL = '<think>\n3\n</think>\n<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
EXCHANGE = [("human", "3"), ("gpt", CALL), ("tool", "3"), ("gpt", "<think>\n3\n</think>\n3")]
DIALOGUE = [("system", "3"), *EXCHANGE, *EXCHANGE]
COLUMNS: dict[str, Any] = {"title": "What is 3?", "samples": {}}


class Row(dict[str, Any]):
    """A row that has every column."""

    def __missing__(self, key: str) -> Any:
        if key == "conversations":  # two calls of a tool, each with its result and a summary, as two scripts demand
            return [Row({"from": who, "role": who, "value": text, "content": text}) for who, text in DIALOGUE]
        if key in COLUMNS:
            return COLUMNS[key]
        if key in CONVERSATIONS:
            said = [("user", "human", "3"), ("assistant", "gpt", CALL), ("tool", "tool", "3")]
            return [Row({"role": role, "content": text, "from": who, "value": text}) for role, who, text in said]
        return Text("3")

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True


class Rows(list[Any]):
    """The part of a data set's interface that scripts use."""

    column_names: Sequence[str] = ("question", "answer")
    features: Any = Row()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self if key in SPLITS else [Text("3")] * len(self)
        return Rows(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def map(self, function: Callable[..., Any] | None = None, *_: Any, with_indices: bool = False, **__: Any) -> Rows:
        rows = (
            [function(row, at) if with_indices else function(row) for at, row in enumerate(self)] if function else self
        )
        return Rows(Row(each) if isinstance(each, dict) else each for each in rows)

    def filter(self, *_: Any, **__: Any) -> Rows:
        return self

    def select(self, indices: Sequence[int], **_: Any) -> Rows:
        return Rows(list.__getitem__(self, at) for at in indices if at < len(self))

    def __contains__(self, key: object) -> bool:
        return key in SPLITS or super().__contains__(key)

    def train_test_split(self, *_: Any, **__: Any) -> dict[str, Rows]:
        return {"train": Rows(self[:6]), "test": Rows(self[6:])}

    def to_list(self) -> list[Any]:
        return list(self)

    def keys(self) -> list[str]:
        return ["train", "test"]

    def items(self) -> list[tuple[str, Rows]]:
        return [(name, self) for name in self.keys()]

    def num_rows(self) -> int:
        return len(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    @classmethod
    def from_list(cls, rows: Sequence[Any], *_: Any, **__: Any) -> Rows:
        return cls(rows)

    @classmethod
    def from_dict(cls, columns: dict[str, Sequence[Any]], *_: Any, **__: Any) -> Rows:
        return cls(Row(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))


SPLITS = frozenset({"train", "test", "validation", "val", "dev", "default", "main", "auxiliary_train", "all"})


def load_dataset(*_: Any, **__: Any) -> Rows:
    return Rows(Row(id=str(number)) for number in range(8))


TABLE = '{"id": "t", "header": ["n"], "rows": [[3]], "types": ["real"]}\n'
QUESTION = '{"table_id": "t", "question": "3", "sql": {"sel": 0, "agg": 0, "conds": []}}\n'
SPLIT_FILES = {f"{split}.{end}" for split in ("train", "dev", "test") for end in ("jsonl", "tables.jsonl", "db")}
FILES = {f"data/{name}": TABLE if "tables" in name else QUESTION for name in SPLIT_FILES}
FILES |= {f"sample_data/{number}.stl": "" for number in range(8)}
FILES |= {"3.csv": "ID,Filled_Template,Filled_Plan\n3,user: 3,3\n3,assistant: 3,3\n"}
PRESENT = ("Judgemark-v2/data", "pay_to_play/questions.json")  # what scripts demand in the checkout


def write_files(folder: Path) -> None:
    """Write the files that scripts look for in the folder they run in, where they may be."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")  # scripts run side by side
        part.write_text(text)
        part.replace(path)
    os.environ["WIKISQL_CACHE_DIR"] = str(folder)


class Sumbootcamp:
    """A task of the package `internbootcamp`."""

    def case_generator(self) -> dict[str, int]:
        return {"sum": 3}

    def prompt_func(self, case: Any) -> str:
        return "What is 1 + 2?"

    @classmethod
    def verify_score(cls, answer: str, *_: Any, **__: Any) -> float:
        return float("3" in answer)


class Ticker:
    """A share with one option, as `yahooquery` gives it."""

    financial_data = Row(UNH=Row(currentPrice=3.0))

    def __init__(self, *_: Any) -> None: ...

    @property
    def option_chain(self) -> Any:
        option = Row(lastPrice=3.0, strike=3.0, impliedVolatility=0.3)
        return SimpleNamespace(iterrows=lambda: [(("UNH", "2100-01-01", "calls"), option)] * 8)


def values(module: str) -> dict[str, Any]:
    """Return the attributes of a package's stand-in that have to be more than a stand-in."""
    from pydantic import BaseModel

    files = [SimpleNamespace(path=f"{kind}/train/3.csv", size=3) for kind in ("hotel", "flight")]
    words = ["letter", "counting", "words", "environment"] * 8
    return {
        "huggingface_hub": {"list_repo_tree": lambda *_, **__: files, "hf_hub_download": lambda *_, **__: "3.csv"},
        "internbootcamp.bootcamp": {"Sumbootcamp": Sumbootcamp},
        "mathgenerator": {"genById": lambda *_: ("1 + 2", "3"), "getGenList": list},
        "nltk.corpus": {"words": SimpleNamespace(words=lambda: words)},
        "pydantic_settings": {"BaseSettings": BaseModel},
        "yahooquery": {"Ticker": Ticker},
    }.get(module, {})


ALWAYS = frozenset({"datasets", "math_verify", "huggingface_hub", "nltk"})
DATA_FILES = frozenset({".csv", ".json", ".jsonl", ".txt"})


class RowsFile(io.StringIO):
    """An absent file: lines of text, which `json.load` reads as a data set."""


def with_absent_files(folders: tuple[str, ...]) -> None:
    """Let absent files below `folders`, and addresses, read as stand-ins."""
    opened, loaded_json, parsed = io.open, json.load, json.loads

    def stand_in_for_absent(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        try:
            return opened(file, mode, *given, **named)
        except FileNotFoundError:
            path = Path(file).absolute()
            if (template := path.with_name(path.name + ".template")).exists():
                return opened(template, mode, *given, **named)
            if mode.strip("tb") != "r" or path.suffix not in DATA_FILES or not str(path).startswith(folders):
                raise
            return io.BytesIO(b"3\n" * 8) if "b" in mode else RowsFile("3\n" * 8)

    def load(file: Any, *given: Any, **named: Any) -> Any:
        return load_dataset() if isinstance(file, RowsFile) else loaded_json(file, *given, **named)

    def loads(text: Any, *given: Any, **named: Any) -> Any:
        return Row() if isinstance(text, str) and text.strip() == "3" else parsed(text, *given, **named)

    builtins.open = io.open = stand_in_for_absent  # type: ignore[assignment]  # pathlib opens through io
    json.load, json.loads = load, loads
    exists = Path.exists

    def exists_here(path: Path, **named: Any) -> bool:
        return exists(path, **named) or str(path).endswith(PRESENT) or exists(path.with_name(path.name + ".template"))

    Path.exists = exists_here  # type: ignore[method-assign]


def with_browser(program: str = "/usr/bin/chromium") -> None:
    """Let playwright start the browser of the machine, since its own is not installed."""
    from playwright.async_api import BrowserType

    launch = BrowserType.launch
    BrowserType.launch = lambda self, **named: launch(self, **{"executable_path": program} | named)  # type: ignore


class _Anything(type):
    """The type of stand-ins for absent packages: any attribute, subscript and operation gives a stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def stand_in(name: str) -> Any:
    return _Anything(name, (_Instance,), {})


class _Instance:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)()

    def __call__(self, *given: Any, **_: Any) -> Any:
        only = given[0] if len(given) == 1 else None
        return only if inspect.isfunction(only) or inspect.isclass(only) else stand_in("result")()

    def __getitem__(self, key: Any) -> Any:
        return stand_in("item")()

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter((stand_in("item")(),))

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self

    def _with(self, other: Any) -> Any:
        return self

    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        vars()[f"__{_name}__"] = vars()[f"__r{_name}__"] = _with

    def __array__(self, *_: Any, **__: Any) -> Any:
        import numpy

        return numpy.full(3, 3.0)

    def __neg__(self) -> Any:
        return self

    def __float__(self) -> float:
        return 3.0

    def __int__(self) -> int:
        return 3

    def __index__(self) -> int:
        return 3

    def __str__(self) -> str:
        return "3"


class Absent(ModuleType):
    """A stand-in for a package that is not installed."""

    __path__: list[str] = []  # noqa: RUF012 - a package without files
    __all__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for the imports that stand in files of the checkout."""

    def __init__(self, folders: tuple[str, ...], ours: frozenset[str]) -> None:
        self.folders, self.ours, self.given = folders, ours, set[str]()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root in self.ours or root in sys.stdlib_module_names or not self._asked_by_script():
            return None
        if root not in ALWAYS and (fullname in sys.modules or _installed(fullname, path)):
            return None
        self.given.add(root)
        return ModuleSpec(fullname, self, is_package=True)

    def _asked_by_script(self) -> bool:
        frame = inspect.currentframe()
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in (__file__, importlib.__file__) and not name.startswith("<frozen importlib"):
                return name.startswith(self.folders)
            frame = frame.f_back
        return False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = Absent(spec.name)
        vars(module).update(values(spec.name))
        if spec.name == "datasets":
            vars(module).update(
                load_dataset=load_dataset,
                Dataset=Rows,
                DatasetDict=dict,
                IterableDataset=Rows,
                load_from_disk=load_dataset,
                concatenate_datasets=lambda sets, **_: Rows(row for each in sets for row in each),
            )
        if spec.name.partition(".")[0] == "transformers":
            vars(module).update(AutoTokenizer=AutoTokenizer)
        if spec.name == "math_verify":
            vars(module).update(parse=lambda text, *_, **__: re.findall(r"\d+", str(text))[-1:], verify=_same)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class AutoTokenizer:
    """The tokenizer that `self.tokenizer` is, for scripts that load their own where `transformers` is not installed."""

    folder = ""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Any:
        from palaestra_contract.chat_tokenizer import ChatTokenizer
        from palaestra_tokens.tokenizers import load_tokenizer

        return ChatTokenizer(load_tokenizer(cls.folder))


def _same(one: Any, other: Any, *_: Any, **__: Any) -> bool:
    return bool(one == other)


def _installed(fullname: str, path: Any) -> bool:
    found = PathFinder.find_spec(fullname, path)
    return found is not None and (found.loader is not None or bool(found.submodule_search_locations))


def environment_class(module: ModuleType, source: str, base: type) -> Any:
    """Return the class whose command line the script runs, or else its last class that is an environment."""
    kinds = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, base)]
    own = [each for each in kinds if each.__module__ == module.__name__]
    named = re.findall(r"(\w+)\.cli\(", source)
    chosen = [each for each in own if each.__name__ in named and each is not base]
    return (chosen or own or [None])[-1]


def loaded(script: Path, options: argparse.Namespace, *, relative: bool) -> ModuleType:
    """Load the script as `python SCRIPT` would, or as `python -m` if it has relative imports."""
    if relative:
        dotted = ".".join(script.relative_to(options.folder).with_suffix("").parts)
        return importlib.import_module(dotted)
    spec = importlib.util.spec_from_file_location("swept_script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["swept_script"] = module
    spec.loader.exec_module(module)
    return module


async def run(options: argparse.Namespace, told: dict[str, Any], finder: StandIns) -> None:
    script = Path(options.script)
    told["stage"] = "load"
    source = script.read_text()
    module = loaded(script, options, relative=re.search(r"^\s*from \.", source, re.MULTILINE) is not None)
    from atroposlib.envs.base import APIServerConfig, BaseEnv

    told["stage"] = "class"
    cls = environment_class(module, source, BaseEnv)
    if cls is None:
        raise LookupError("the script defines no environment class")
    told["class"] = cls.__name__
    form: Any = None
    if options.side == "ours":
        from palaestra_contract.base_env import ClassForm
        from palaestra_tokens.server_group import ServerGroup

        form = ClassForm(cls, str(script))
    told["stage"] = "config"
    config, _ = form.defaults() if form else cls.config_init()
    config.tokenizer_name, config.use_wandb, config.group_size = options.tokenizer, False, 4
    config.data_path_to_save_groups = config.data_dir_to_save_evals = None
    if getattr(config, "custom_thinking_prompt", "") is None:  # twelve scripts print its first characters
        config.custom_thinking_prompt = "Think."
    servers = [
        APIServerConfig(
            base_url=options.url,
            model_name="fixed",
            server_type=options.server,
            api_key="x",
            health_check=False,
            tokenizer_name=options.tokenizer,
        )
    ]
    told["stage"] = "init"
    if form:
        group = ServerGroup(servers)
        built = form.build(config, servers, group)
        env = built.inner
    else:
        env = cls(config, servers, slurm=False, testing=False)
    random.seed(0)
    if form:
        await group.start()
    told["stage"] = "setup"
    await env.setup()
    told["stage"] = "item"
    item = await env.get_next_item()
    told["item"] = type(item).__name__
    if options.until == "item":
        told["stage"] = "done"
        return
    told["stage"] = "play"
    told["groups"] = []
    for number in range(2):
        item = await env.get_next_item() if number else item
        async with asyncio.timeout(options.timeout_s / 3):
            group_rows, _ = await env.collect_trajectories(item)
            group_rows = await env.postprocess_histories(group_rows)
        told["groups"].append(rows_of(group_rows))
    told["stage"] = "done"


def rows_of(group: Any) -> Any:
    """Return a group's tokens, masks and scores as plain lists."""
    if isinstance(group, list):
        return [rows_of(each) for each in group]
    if group is None:
        return None
    return {name: plain(group.get(name)) for name in ("tokens", "masks", "scores")}


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def as_release_4() -> None:
    """Let `apply_chat_template` return ids by default, as before release 5 of transformers. With release 5, the
    `tokenize_for_trainer` of atroposlib gets a mapping and cannot build a mask."""
    from transformers import PreTrainedTokenizerBase

    newer = PreTrainedTokenizerBase.apply_chat_template

    def older(self: Any, *given: Any, return_dict: bool = False, **named: Any) -> Any:
        return newer(self, *given, return_dict=return_dict, **named)

    PreTrainedTokenizerBase.apply_chat_template = older


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("script", "--folder", "--side", "--tokenizer", "--url", "--server", "--until", "--packages"):
        parser.add_argument(name)
    parser.add_argument("--timeout_s", type=float, default=60.0)
    options = parser.parse_args()
    sys.argv = [options.script]
    told: dict[str, Any] = {"script": options.script, "stage": "start"}
    AutoTokenizer.folder = options.tokenizer
    here = str(Path(__file__).parent)
    sys.path[:] = [str(Path(options.script).parent), options.packages, *(each for each in sys.path if each != here)]
    ours = frozenset(
        {
            "palaestra",
            "palaestra_slots",
            "palaestra_tokens",
            "atroposlib",
            *(each.name for each in Path(options.script).parent.iterdir()),
        }
    )
    finder = StandIns((options.folder, options.packages), ours)
    if options.side == "ours":
        importlib.import_module("palaestra.compat")
    else:
        import atroposlib.envs.base  # noqa: F401 - before the stand-ins, which it must not get

        as_release_4()
    sys.meta_path.insert(0, finder)
    if loaded_already := sys.modules.get("huggingface_hub"):
        vars(loaded_already).update(values("huggingface_hub"))
    with_absent_files((options.folder, options.packages))
    write_files(Path(options.packages))
    with contextlib.suppress(ImportError):
        with_browser()
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        asyncio.run(asyncio.wait_for(run(options, told, finder), options.timeout_s))
    except BaseException as error:  # the report is about every kind of failure
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        told["error"] = f"{type(cause).__name__}: {cause}"
        frames = traceback.extract_tb(cause.__traceback__)
        told["at"] = next((f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames)), "")
        with contextlib.suppress(Exception):
            traceback.print_exception(cause, file=sys.stderr)
    told["stand_ins"] = sorted(finder.given)
    out.write(json.dumps(told, default=repr) + "\n")
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
