"""Entry point: `python -I -S …/slotd FD full|userns|confined|none`. Only the standard library can be imported."""

import importlib
import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with_namespaces = sys.argv[2] in ("full", "userns")
    launch = importlib.import_module(
        "slotd.bootstrap" if with_namespaces else "slotd.unprivileged.unprivileged_bootstrap"
    )
    del sys.path[0]
    sys.exit(launch.main(sys.argv[1:]))
