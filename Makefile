.DEFAULT_GOAL := help
.PHONY: help demo test slow check docs docs-test integrations bench same hang verify-corpus convert-corpus torch-suite kill-loop fuzz crash-points power-loss attack pairs ways requeue mistakes mutants types long versions gpu gpus cluster clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   train a small network at 1 and 2 processes and compare (no download, no GPU)"
	@echo "make test   run the tests; as root on Debian it installs Slurm and MPI for them first"
	@echo "make slow   run the tests that take more than two seconds each, as kills, hangs and whole jobs do"
	@echo "make check  formatting, lint, types, and the rules of tests/test_house.py"
	@echo "make docs   build the site in site/; make docs-test also opens every page in a browser"
	@echo "make bench  measure steps, loading, equal bits and commits beside the peers; results in benchmarks/results"
	@echo "make integrations   Accelerate, Lightning, W&B and others beside samestep"
	@echo "make same   80 scripts at 1, 2, 3 and 5 processes against the untouched ones"
	@echo "make verify-corpus    a hundred scripts, half of them with mistakes, each with the verdict it should get"
	@echo "make convert-corpus   convert serial scripts, and run each at 1, 2 and 3 processes beside the untouched one"
	@echo "make torch-suite      torch's own DDP tests with replicate, and accelerate's test scripts under samestep run"
	@echo "make hang   74 runs that hang, and 200 that are slow but do not"
	@echo "make kill-loop, make fuzz, make crash-points, make power-loss, make attack, make pairs, make ways,"
	@echo "make requeue, make mistakes, make mutants, make types, make long   the long suites"
	@echo "make versions   the tests of training under other versions of Python and torch; downloads several GB"
	@echo "make gpu, make gpus   what is to be tried on one GPU, or on several; without one as far as it goes"
	@echo "make cluster   a shell in a Slurm of four nodes on this machine"
	@echo "make clean  remove .venv and everything else that was made here"

demo: .venv/made
	@.venv/bin/samestep demo

test: .venv/made
	.ci/setup system
	.venv/bin/python -m pytest -n 3 -m "not slow"

slow: .venv/made
	.ci/setup system
	.venv/bin/python -m pytest -n 3 -m slow

check: .venv/made
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/python -m pytest tests/test_house.py

docs: .venv/made-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "site/index.html is the first page: open it in a browser"

docs-test: docs
	.ci/setup browser
	.venv/bin/python -m pytest tests/tutorial.py tests/browser.py

integrations: .venv/made-integrations
	.venv/bin/python -m pytest tests/peers.py tests/integrations.py

bench: .venv/made-bench
	.venv/bin/python benchmarks/control.py --keep
	for benchmark in overhead meter watch recovery data exact same checkpoint peers launchers lines weight; do .venv/bin/python benchmarks/$$benchmark.py || exit; done

same: .venv/made
	LONG=1 .venv/bin/python -m pytest tests/same

verify-corpus: .venv/made
	.venv/bin/python tests/verify/corpus.py

convert-corpus: .venv/made
	.venv/bin/python tests/convert/corpus.py

torch-suite: .venv/made-bench
	.venv/bin/python tests/torch_suite.py
	.venv/bin/python tests/accelerate_suite.py

hang: .venv/made
	.venv/bin/python tests/hang.py

kill-loop: .venv/made
	.venv/bin/python tests/kill_loop.py
	.venv/bin/python tests/in_place.py

fuzz: .venv/made
	.venv/bin/python tests/fuzz_state.py

crash-points: .venv/made
	.venv/bin/python tests/crash_points.py

power-loss: .venv/made
	.venv/bin/python tests/power_loss.py

attack: .venv/made
	LONG=1 .venv/bin/python -m pytest tests/attack

pairs: .venv/made
	PAIRS=100 .venv/bin/python -m pytest tests/cluster/test_meeting.py

ways: .venv/made
	LONG=1 .venv/bin/python -m pytest tests/cluster/test_matrix.py

requeue: .venv/made
	LONG=1 .venv/bin/python -m pytest tests/cluster/test_requeue.py

mistakes: .venv/made
	LONG=1 .venv/bin/python -m pytest tests/verify/test_verify.py

gpu: $(if $(PYTHON),,.venv/made)
	$(or $(PYTHON),.venv/bin/python) tests/gpu/plan.py

gpus: $(if $(PYTHON),,.venv/made)
	$(or $(PYTHON),.venv/bin/python) tests/gpu/plan.py --many

mutants: .venv/made
	.venv/bin/python tests/mutants.py --count 200

long: .venv/made
	LONG=1 .venv/bin/python -m pytest -m long

versions: .venv/made
	.venv/bin/python tests/versions.py

types: .venv/made
	.venv/bin/python -m pip install --quiet pyright==1.1.414
	LONG=1 .venv/bin/python -m pytest tests/types

cluster: .venv/made
	.venv/bin/python tests/cluster

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist runs site src/*.egg-info

.venv/made: pyproject.toml constraints.txt
	@.ci/setup venv dev
	@touch $@

.venv/made-bench: pyproject.toml constraints.txt
	@.ci/setup venv dev,bench
	@touch $@ .venv/made

.venv/made-docs: pyproject.toml constraints.txt
	@.ci/setup venv dev,docs
	@touch $@ .venv/made

.venv/made-integrations: pyproject.toml constraints.txt
	@.ci/setup venv dev,integrations
	@touch $@ .venv/made
