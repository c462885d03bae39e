"""Tasks about configuration formats: INI, TOML, YAML, nested JSON and environment files.

Each function that returns a `TaskPart` builds one kind of task; its docstring, if any, describes the work that the task
asks for.
"""

from __future__ import annotations

import copy
import json

from palaestra_slots.core.types import JSON
from palaestra_suites.endless_terminals.checks.data_checks import Ini, Json, Toml, Yaml
from palaestra_suites.endless_terminals.family import DataFile, Family, TaskPart, python
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.words import CITIES, SERVICES


def _sections(draw: Draw, count: int) -> dict[str, dict[str, str]]:
    """Return INI sections, each with a few settings."""
    return {
        service: {
            "host": f"{draw.fresh()}.internal",
            "port": str(draw.between(1024, 9999)),
            "region": draw.pick(CITIES).lower(),
            draw.fresh(): draw.pick(["on", "off"]),
        }
        for service in draw.sample(SERVICES, count)
    }


def _ini_text(sections: dict[str, dict[str, str]]) -> str:
    blocks = ["".join([f"[{name}]\n", *(f"{k} = {v}\n" for k, v in body.items())]) for name, body in sections.items()]
    return "; kept by hand\n" + "\n".join(blocks)


def ini_edited(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    sections = _sections(draw, 4)
    path = f"{place}/{draw.fresh()}.ini"
    after = copy.deepcopy(sections)
    first, second, third, _ = draw.shuffled(list(sections))
    port, key, value = str(draw.between(10_000, 20_000)), draw.fresh(), draw.fresh()
    after[first]["port"] = port
    after[second][key] = value
    del after[third]["region"]
    ask = (
        f"Edit `{path}` in place: in section `{first}` set `port` to {port}; in section `{second}` add the key "
        f"`{key}` with "
        f"the value `{value}`; in section `{third}` remove the key `region`. All other sections, keys and values stay."
    )
    code = (
        f"import configparser\nc = configparser.ConfigParser(interpolation=None)\nc.read({path!r})\n"
        f"c[{first!r}]['port'] = {port!r}\nc[{second!r}][{key!r}] = {value!r}\ndel c[{third!r}]['region']\n"
        f"with open({path!r}, 'w') as file:\n    c.write(file)"
    )
    return TaskPart(ask, python(code), (Ini(path, after),), {path: _ini_text(sections)})


def ini_to_json(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    sections = _sections(draw, draw.between(3, 5))
    path, target = f"{place}/{draw.fresh()}.ini", f"{place}/{draw.fresh()}.json"
    value = {name: {**body, "port": int(body["port"])} for name, body in sections.items()}
    ask = (
        f"Convert `{path}` (INI) to `{target}`: a JSON object with one key for each section, whose value is an object "
        "of its "
        "keys and values. `port` becomes a number; every other value stays a string, as it is written."
    )
    code = (
        f"import configparser, json\nc = configparser.ConfigParser(interpolation=None)\nc.read({path!r})\n"
        "result = {s: dict(c[s]) for s in c.sections()}\nfor body in result.values():\n"
        f"    body['port'] = int(body['port'])\njson.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), {path: _ini_text(sections)})


def toml_written(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Convert JSON settings to TOML."""
    path, target = f"{place}/{draw.fresh()}.json", f"{place}/{draw.fresh()}.toml"
    value: dict[str, JSON] = {
        "title": f"{draw.fresh()} {draw.fresh()}",
        "owner": {"name": draw.fresh(), "age": draw.between(20, 70)},
        "servers": {
            name: {"ports": [draw.between(1024, 9999) for _ in range(3)], "enabled": draw.chance(50)}
            for name in draw.words(draw.between(2, 3))
        },
    }
    ask = (
        f"Write the settings of `{path}` (JSON) as TOML to `{target}`: nested objects become tables, and names, "
        "nesting, "
        "types and values stay the same."
    )
    code = (
        f"import json\nv = json.load(open({path!r}))\nq = json.dumps\n"
        "out = ['title = ' + q(v['title']), '', '[owner]', *(k + ' = ' + q(x) for k, x in v['owner'].items())]\n"
        "for name, body in v['servers'].items():\n    out += ['', '[servers.' + name + ']']\n"
        "    out += [k + ' = ' + q(x) for k, x in body.items()]\n"
        f"open({target!r}, 'w').write('\\n'.join(out) + '\\n')"
    )
    return TaskPart(ask, python(code), (Toml(target, value),), {path: json.dumps(value, indent=2) + "\n"})


def toml_read(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """List the dependencies of a TOML file that are not optional, as JSON."""
    names = draw.words(draw.between(4, 7))
    path, target = f"{place}/project.toml", f"{place}/{draw.fresh()}.json"
    versions = {name: f"{draw.between(0, 9)}.{draw.between(0, 20)}.{draw.between(0, 9)}" for name in names}
    optional = {name: draw.chance(40) for name in names}
    text = f'[project]\nname = "{draw.fresh()}"\n'
    for name in names:
        text += f'\n[dependencies.{name}]\nversion = "{versions[name]}"\noptional = {str(optional[name]).lower()}\n'
    value = sorted(f"{name}=={versions[name]}" for name in names if not optional[name])
    ask = (
        f"`{path}` (TOML) has a table `dependencies` with a `version` and a flag `optional` for each name. Write "
        f"`{target}`: a "
        "JSON list of the strings `NAME==VERSION` of those that are not optional, sorted."
    )
    code = (
        f"import json, tomllib\nd = tomllib.load(open({path!r}, 'rb'))['dependencies']\n"
        "result = sorted(n + '==' + b['version'] for n, b in d.items() if not b['optional'])\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), {path: text})


def yaml_written(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Convert a CSV list of services to YAML with text, numbers, booleans and lists."""
    path, target = f"{place}/{draw.fresh()}.csv", f"{place}/{draw.fresh()}.yaml"
    services = draw.sample(SERVICES, draw.between(3, 5))
    rows = {name: (draw.between(1, 9), draw.chance(50), draw.sample(CITIES, draw.between(1, 3))) for name in services}
    text = "name,replicas,public,regions\n" + "".join(
        f"{name},{n},{'yes' if public else 'no'},{'|'.join(regions)}\n" for name, (n, public, regions) in rows.items()
    )
    value = {
        "services": [
            {"name": name, "replicas": n, "public": public, "regions": regions}
            for name, (n, public, regions) in rows.items()
        ]
    }
    ask = (
        f"Turn `{path}` (CSV) into the YAML file `{target}`: one key `services`, a list with one mapping for each row "
        "in "
        "order, with `name` (text), `replicas` (a number), `public` (true or false for yes and no) and `regions` (a "
        "list of "
        "the names that `|` separates)."
    )
    code = (
        f"import csv\nout = ['services:']\nfor row in csv.DictReader(open({path!r})):\n"
        "    out += ['- name: ' + row['name'], '  replicas: ' + row['replicas'],\n"
        "            '  public: ' + ('true' if row['public'] == 'yes' else 'false'), '  regions:']\n"
        "    out += ['  - ' + region for region in row['regions'].split('|')]\n"
        f"open({target!r}, 'w').write('\\n'.join(out) + '\\n')"
    )
    return TaskPart(ask, python(code), (Yaml(target, value),), {path: text})


def json_edited(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Change a few nested values of a document."""
    path = f"{place}/{draw.fresh()}.json"
    names = draw.sample(SERVICES, 4)
    value: dict[str, JSON] = {
        "version": draw.between(1, 9),
        "services": [
            {
                "name": name,
                "limits": {"cpu": draw.between(1, 8), "memory": 128 * draw.between(1, 16)},
                "tags": draw.words(2),
            }
            for name in names
        ],
    }
    after = copy.deepcopy(value)
    first, second, third = draw.sample(range(4), 3)
    memory, tag = 4096 + 128 * draw.between(1, 16), draw.fresh()
    after["version"] += 1
    after["services"][first]["limits"]["memory"] = memory
    after["services"][second]["tags"].append(tag)
    del after["services"][third]
    ask = (
        f"Change the JSON file `{path}` in place: raise `version` by one; set the memory limit of the service "
        f"`{names[first]}` "
        f"to {memory}; append the tag `{tag}` to the service `{names[second]}`; remove the service `{names[third]}` "
        "from the "
        "list. The rest stays, in the same order."
    )
    code = (
        f"import json\nv = json.load(open({path!r}))\nby = {{s['name']: s for s in v['services']}}\nv['version'] += 1\n"
        f"by[{names[first]!r}]['limits']['memory'] = {memory}\nby[{names[second]!r}]['tags'].append({tag!r})\n"
        f"v['services'].remove(by[{names[third]!r}])\njson.dump(v, open({path!r}, 'w'), indent=2)"
    )
    return TaskPart(ask, python(code), (Json(path, after),), {path: json.dumps(value, indent=2) + "\n"})


def json_merged(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Merge one document into another recursively."""
    base_path, over_path, target = f"{place}/base.json", f"{place}/override.json", f"{place}/{draw.fresh()}.json"
    a, b, c, d, e = draw.words(5)
    base = {
        a: {b: draw.between(1, 50), c: [1, 2, 3], "mode": draw.fresh()},
        d: {e: {"on": True, "level": draw.between(1, 9)}},
        "name": draw.fresh(),
    }
    over = {a: {b: draw.between(51, 99), c: [draw.between(4, 9)]}, d: {e: {"level": None, "extra": draw.fresh()}}}
    ask = (
        f"Merge `{over_path}` over `{base_path}` (both JSON) and write the result to `{target}`: where both have an "
        "object under "
        "the same key, merge the objects by the same rule; in every other case the value of the first-named file "
        "replaces the "
        "other one (lists too); a `null` there removes the key. Keys that only one file has stay."
    )
    code = (
        "import json\ndef merge(old, new):\n    if not (isinstance(old, dict) and isinstance(new, dict)):\n"
        "        return new\n    both = {k: merge(old[k], new[k]) if k in old else new[k] for k in new}\n"
        "    return {k: v for k, v in {**old, **both}.items() if v is not None}\n"
        f"result = merge(json.load(open({base_path!r})), json.load(open({over_path!r})))\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    files = {base_path: json.dumps(base, indent=2) + "\n", over_path: json.dumps(over, indent=2) + "\n"}
    return TaskPart(ask, python(code), (Json(target, _merged(base, over)),), files)


def _merged(old: JSON, new: JSON) -> JSON:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    result = dict(old)
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(old.get(key), value)
    return result


def env_to_json(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    path, target = f"{place}/{draw.fresh()}.env", f"{place}/{draw.fresh()}.json"
    values = {f"{word.upper()}_{draw.fresh().upper()}": draw.sentence(shortest=1, longest=3) for word in draw.words(6)}
    lines = [
        f'{key}="{value}"' if " " in value or draw.chance(30) else f"{key}={value}" for key, value in values.items()
    ]
    twice = draw.pick(sorted(values))
    lines.append(f"export {twice}={draw.fresh()}")
    values[twice] = lines[-1].partition("=")[2]
    text = "\n".join(["# settings", *lines[:3], "", f"# {lines[0]}x", *lines[3:]]) + "\n"
    ask = (
        f"`{path}` sets variables, one a line: `NAME=VALUE`, perhaps with `export ` before it and with double quotes "
        "around the "
        "value; lines that begin with `#` and empty lines say nothing; of a name that is set twice the last value "
        "counts. "
        f"Write them to `{target}` as one JSON object of strings (without the quotes)."
    )
    code = (
        f"import json\nresult = {{}}\nfor line in open({path!r}):\n    line = line.strip()\n"
        "    if not line or line.startswith('#'):\n        continue\n"
        "    name, _, value = line.removeprefix('export ').partition('=')\n    result[name] = value.strip('\"')\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, values),), {path: text})


FAMILIES = (
    Family("ini-edit", ini_edited),
    Family("ini-json", ini_to_json),
    Family("toml-write", toml_written),
    Family("toml-read", toml_read),
    Family("yaml-write", yaml_written),
    Family("json-edit", json_edited),
    Family("json-merge", json_merged),
    Family("env-json", env_to_json),
)
