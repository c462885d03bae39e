"""Write or fix small programs, checked by hidden tests.

    python environments/hermes_swe_env.py process --policy oracle
    python environments/hermes_swe_env.py process --env.dataset_name tasks.jsonl \\
        --openai.base_url http://localhost:8000/v1 --openai.model_name NAME
    python environments/hermes_swe_env.py evaluate --env.data_dir_to_save_evals evals

The oracle scores 1.0 on every task and doing nothing 0.0. No dataset and no network are needed.
"""

from palaestra_contract import HermesSweEnv

if __name__ == "__main__":
    HermesSweEnv.cli()
