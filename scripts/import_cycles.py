"""Refuse import cycles between modules, including imports for types, imports inside functions, and modules that are
named in strings, such as `"palaestra.rollouts.export.openai:OpenAIExporter"` in a file that calls `import_module`.

If there is a cycle, prints one and exits with code 1.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
from package_order import FOLDERS


def named_in_strings(module: str, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules that strings of a module name, if it imports modules by their names."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    if "import_module" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in modules and name != module:
                yield name


def main() -> int:
    """Check the packages."""
    graph = grimp.build_graph(*FOLDERS, exclude_type_checking_imports=False)
    packages = {module for module in graph.modules if graph.find_children(module)}
    modules = graph.modules - packages
    sorter = TopologicalSorter(
        {
            module: (graph.find_modules_directly_imported_by(module) - packages) | {*named_in_strings(module, modules)}
            for module in modules
        }
    )
    try:
        sorter.prepare()
    except CycleError as error:
        print("import cycle:", " -> ".join(reversed(error.args[1])))
        return 1
    print("no import cycles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
