"""`palaestra eval ENV [flags]`: measure how often a model solves an environment's tasks, with confidence intervals."""

from __future__ import annotations

from palaestra.cli.run import front_door

command = front_door(
    "eval",
    """Try every task several times and report how many are solved, with 95% intervals.

    \b
      palaestra eval my_env.py --samples 4 --base-url http://localhost:8000/v1 --model NAME
      palaestra eval endless_terminals --env.n 50 --policy oracle
      palaestra eval my_env.py --env.held_out 0.2 --policy oracle    # only the held-out tasks

    This is `palaestra run ENV evaluate`, with the same settings; --samples N sets how often each task is tried. The
    results and one line per rollout are written to the run's folder, below `evaluation`, and also to the folder
    --env.data_dir_to_save_evals if that is set.
    `palaestra compare RUN OTHER` compares two runs of the same tasks.
    """,
    "evaluate",
)
