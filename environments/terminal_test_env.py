"""Create small files with the terminal: a smoke test of model, tools, slots and grading, in seconds.

    python environments/terminal_test_env.py process --env.data_path_to_save_groups out.jsonl --policy oracle
    python environments/terminal_test_env.py evaluate --env.data_dir_to_save_evals evals --policy oracle

The oracle scores 1.0 on every task and doing nothing 0.0. No dataset and no network are needed.
"""

from palaestra_contract import TerminalTestEnv

if __name__ == "__main__":
    TerminalTestEnv.cli()
