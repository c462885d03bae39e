"""Fix bugs in real repositories, scored by the repositories' own tests.

    python environments/swe_smith_oracle_env.py process --env.total_steps 2 --policy oracle
    python environments/swe_smith_oracle_env.py process --env.dataset_name tasks.jsonl \\
        --openai.base_url http://localhost:8000/v1 --openai.model_name NAME
    python environments/swe_smith_oracle_env.py evaluate --env.data_dir_to_save_evals evals

The oracle scores 1.0 on every task and doing nothing 0.0.
"""

from palaestra_contract import SweSmithOracleEnv

if __name__ == "__main__":
    SweSmithOracleEnv.cli()
