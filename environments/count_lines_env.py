"""Count the lines of a file: the smallest complete environment.

palaestra run environments/count_lines_env.py --policy oracle --env.n 20
"""

from palaestra_suites import count_lines

__all__ = ["count_lines"]
