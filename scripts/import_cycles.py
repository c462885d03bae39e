"""Refuse import cycles between modules, including imports for types and imports inside functions.

If there is a cycle, prints one and exits with code 1.
"""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter

import grimp


def main() -> int:
    """Check the package."""
    graph = grimp.build_graph("palaestra", exclude_type_checking_imports=False)
    packages = {module for module in graph.modules if graph.find_children(module)}
    sorter = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) - packages for module in graph.modules - packages}
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
