"""`palaestra feed ENV [flags]`: send an environment's rollouts to a trainer as they finish."""

from __future__ import annotations

from palaestra.cli.run import front_door

command = front_door(
    "feed",
    """Serve an environment's rollouts to a trainer, as fast as the trainer accepts them.

    \b
      palaestra serve api &                                                       # the trainer fetches them here
      palaestra feed my_env.py --base-url http://localhost:9001/v1 --model NAME
      palaestra feed my_env.py --to http://trainer:8000 --group 8 --base-url http://localhost:9001/v1 --model NAME

    This is `palaestra run ENV serve`, with the same settings; --to URL is the trajectory server, by default
    http://localhost:8000. The command runs until the trainer has all its batches, or for --tasks N groups.
    """,
    "serve",
)
