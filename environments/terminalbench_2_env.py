"""Work in a terminal, checked by each task's own verifier: Terminal-Bench 1 and 2, and Harbor tasks.

    python environments/terminalbench_2_env.py evaluate --env.dataset_name tasks/ --env.group_size 4 \\
        --openai.base_url http://localhost:8000/v1 --openai.model_name NAME
    python environments/terminalbench_2_env.py process --env.dataset_name tasks/ --policy oracle

The oracle scores 1.0 on every task and doing nothing 0.0; `palaestra env import DIR` lists the tasks for which this is
not true.
"""

from palaestra_contract import TerminalBench2EvalEnv

if __name__ == "__main__":
    TerminalBench2EvalEnv.cli()
