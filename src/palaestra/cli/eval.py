"""`palaestra eval ENV [flags]`: measure how often a model solves an environment's tasks, with confidence intervals."""

from __future__ import annotations

from palaestra.cli.run import front_door

command = front_door(
    "eval",
    """Try every task several times and say how many are solved, with 95 % intervals.

    \b
      palaestra eval my_env.py --samples 4 --base-url http://localhost:8000/v1 --model NAME
      palaestra eval endless_terminals --env.n 50 --policy oracle
      palaestra eval my_env.py --env.held_out 0.2 --policy oracle    # only the tasks that `run` never gives

    It is `palaestra run ENV evaluate`, and takes the same settings; --samples N is how often each task is tried. The
    figures and one line per rollout are in the run's folder, below `evaluation`; --env.data_dir_to_save_evals DIR gets
    a copy.
    Two runs of the same tasks: `palaestra compare RUN OTHER`.
    """,
    "evaluate",
)
