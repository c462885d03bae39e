"""What a score function may call to check Python code of the agent: hidden tests with a verdict for each.

`sandbox.call("package.module:function", args)` is the other way: it runs one function of the work in its own process,
and the score function compares the value.
"""

from palaestra_suites.grading.hidden_tests import TestVerdicts, run_tests

__all__ = ["TestVerdicts", "run_tests"]
