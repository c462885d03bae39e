"""Many kinds of terminal work, generated from a seed or read from a file or from task folders.

    palaestra run endless_terminals process --env.n 20 --env.seed 7 --env.level 2 --policy oracle
    palaestra run endless_terminals process --env.dataset_name tasks.jsonl \\
        --openai.base_url http://localhost:8000/v1 --openai.model_name NAME

The oracle scores 1.0 on every generated task and doing nothing 0.0.
"""

from palaestra_contract import EndlessTerminalsEnv

if __name__ == "__main__":
    EndlessTerminalsEnv.cli()
