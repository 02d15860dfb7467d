# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# without bytecode every start of Python would compile us anew
unexport PYTHONDONTWRITEBYTECODE
READY := $(VENV)/.ready
KILLS ?= 500
MINUTES ?= 60
# workers for tests, 0 for none: two a core, as tests wait for half of their time
JOBS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 12 ? n : 12)))
# end-to-end tests side by side, 0 for one after the other: they share one cluster
E2E_JOBS ?= 3

# another torch than the pinned one: the newest
TORCH ?= 2.14.1
TORCH_TESTS ?= $(addprefix tests/,lib image layouts resharding dcp faults archive cli examples)

# the frameworks of training that the library goes into
FRAMEWORKS := .venv-frameworks

.PHONY: demo docs screenshots packages test test-torch test-gpu try-gpu test-frameworks check e2e chart dist test-dist lock sbom bench bench-gpu soak soak-tiers attacks fuzz clean help

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(READY): requirements-dev.txt lib/pyproject.toml sidecar/pyproject.toml operator/pyproject.toml
	@echo "setting up $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e lib -e sidecar -e operator
	@touch $@

demo: $(READY) ## train a small GPT, kill it four times, compare the loss curves bit by bit
	$(BIN)/python examples/demo.py

# what the tests look for beyond Python: command:package of Debian's; what cannot be installed is named,
# and the tests that need it fail or are skipped with that reason
PACKAGES := chromium:chromium chromedriver:chromium-driver mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs \
	slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2

packages:
	@lacking() { for one in $(PACKAGES); do PATH=$$PATH:/usr/sbin:/sbin command -v $${one%:*} >/dev/null || echo $${one#*:}; done; }; \
	if [ -n "$$(lacking)" ]; then \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$(lacking); } >/dev/null; \
		for one in $$(lacking); do echo "missing, and not to be had by apt-get here: $$one; some tests need it"; done; \
	fi

test: check packages ## lint, types, import contracts, and every test that needs no cluster
	$(BIN)/python -m pytest tests --ignore tests/frameworks --ignore tests/conformance/packages --ignore tests/gpu -n $(JOBS) --dist worksteal -m "not e2e and not soak" \
		--junitxml build/junit-test.xml $(PYTEST_ARGS)

.venv-torch-$(TORCH)/.ready: requirements-dev.txt lib/pyproject.toml sidecar/pyproject.toml operator/pyproject.toml
	@echo "setting up $(@D) (gigabytes: a torch with CUDA)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@sed 's/^torch==.*/torch==$(TORCH)/' requirements-dev.txt | $(@D)/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e lib -e sidecar -e operator
	@touch $@

test-torch: .venv-torch-$(TORCH)/.ready ## the library's tests with another torch: TORCH=2.14.1, TORCH_TESTS=DIRECTORIES
	.venv-torch-$(TORCH)/bin/python -m pytest $(TORCH_TESTS) -n $(JOBS) --dist worksteal -m "not e2e and not soak" \
		--junitxml build/junit-torch.xml $(PYTEST_ARGS)

try-gpu: $(READY) ## the scripts for a GPU at a tiny size on a CPU, so that none is tried on a device first
	TRAIN_ON=cpu $(BIN)/python -m pytest tests/gpu -n $(JOBS) -k plain --junitxml build/junit-try-gpu.xml
	TRAIN_ON=cpu PYTHONPATH=lib/src:sidecar/src $(BIN)/python -m bench.gpu --out build --name try-gpu
	PYTHONPATH=lib/src:sidecar/src $(BIN)/python -m bench.host --tensors 1200

test-gpu: .venv-torch-$(TORCH)/.ready ## kills of a training on a GPU, with a torch that has CUDA
	.venv-torch-$(TORCH)/bin/python -m pytest tests/gpu -n 4 --junitxml build/junit-gpu.xml $(PYTEST_ARGS)

$(FRAMEWORKS)/.ready: requirements-frameworks.txt requirements-vision.txt lib/pyproject.toml sidecar/pyproject.toml
	@echo "setting up $(FRAMEWORKS) (some minutes the first time)"
	@test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/pip install -q --disable-pip-version-check -r requirements-frameworks.txt
	@$(FRAMEWORKS)/bin/pip install -q --disable-pip-version-check --no-deps --upgrade --target $(FRAMEWORKS)/vision -r requirements-vision.txt
	@$(FRAMEWORKS)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e lib -e sidecar
	@# accelerate's own tests are in its source distribution alone
	@rm -rf $(FRAMEWORKS)/own-tests && mkdir -p $(FRAMEWORKS)/own-tests/accelerate
	@$(FRAMEWORKS)/bin/pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary accelerate \
		-d $(FRAMEWORKS)/own-tests $$(grep ^accelerate== requirements-frameworks.txt)
	@tar -xzf $(FRAMEWORKS)/own-tests/accelerate-*.tar.gz -C $(FRAMEWORKS)/own-tests/accelerate --strip-components 1 --wildcards '*/tests/*'
	@echo "compiling DeepSpeed's CPU Adam (some minutes); without it one row of tests/conformance is skipped"
	-@DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(FRAMEWORKS)/extensions PATH=$(CURDIR)/$(FRAMEWORKS)/bin:$$PATH \
		$(FRAMEWORKS)/bin/python -c "from deepspeed.ops.op_builder import CPUAdamBuilder as one; one().load(verbose=False)" >/dev/null 2>&1
	@touch $@

test-frameworks: $(FRAMEWORKS)/.ready ## keepstep.integrations with the frameworks themselves, in an environment of their own
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks tests/conformance/packages -n 3 --dist worksteal \
		--junitxml build/junit-frameworks.xml $(PYTEST_ARGS)

check: $(READY) ## ruff, imports of tests, mypy --strict, import-linter, and the limits of scripts/house.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.imports
	$(BIN)/mypy
	PYTHONPATH=lib/src:sidecar/src:operator/src $(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/house.py

e2e: $(READY) ## the end-to-end suite on a kind cluster of its own (needs docker, kind, kubectl, helm)
	$(BIN)/python -m pytest -m e2e tests/e2e -n $(E2E_JOBS) --dist load --maxschedchunk 1 \
		--durations=15 --junitxml build/junit-e2e.xml $(PYTEST_ARGS)

chart: $(READY) ## the chart's README from its values, and a package of it in build/, for helm push
	$(BIN)/python scripts/chart_reference.py package $(CHART_ARGS)

.venv-docs/.ready: requirements-docs.txt
	@echo "setting up $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -q --disable-pip-version-check -r requirements-docs.txt
	@touch $@

docs: $(READY) .venv-docs/.ready ## the site, in build/site; fails where a link or a reference leads nowhere
	$(BIN)/python scripts/site.py build/tables
	PYTHONPATH=lib/src:sidecar/src NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

screenshots: $(READY) packages ## the pictures of docs/images, from a run that is trained and killed for them
	$(BIN)/python scripts/screenshots.py

dist: build/dist-tools/.ready ## wheels and sdists of library, sidecar and operator, in build/dist
	rm -rf build/dist build/dist-source
	mkdir -p build/dist-source
	@# from copies, which have the licence beside them and leave nothing of the build in the tree
	for part in lib sidecar operator; do \
		git ls-files -z $$part | tar --null -T - -c | tar -x -C build/dist-source && cp LICENSE build/dist-source/$$part/ && \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) build/dist-tools/bin/python -m build -q --no-isolation \
			-o build/dist build/dist-source/$$part || exit 1; done
	build/dist-tools/bin/twine check --strict build/dist/*

test-dist: dist ## install what dist built into a bare environment, and train there
	$(PYTHON) scripts/check_dist.py

lock: build/lock/.ready ## lock what the images are made of, with hashes; wheels for amd64 and arm64
	PATH=$(CURDIR)/build/lock/bin:$$PATH $(PYTHON) scripts/lock.py $(LOCK_ARGS)

sbom: build/lock/.ready ## what the images are made of, as CycloneDX, in build/
	for part in operator sidecar; do build/lock/bin/cyclonedx-py requirements $$part/requirements.lock \
		--pyproject $$part/pyproject.toml --output-reproducible -o build/sbom-$$part.cdx.json || exit 1; done

bench: $(READY) build/peers/.ready ## all benchmarks beside their peers and floors (about a quarter of an hour)
	$(BIN)/python -m bench

bench-gpu: $(READY) ## the GPU benchmark: one script, one GPU
	PYTHONPATH=lib/src:sidecar/src $(BIN)/python -m bench.gpu

soak: $(READY) ## kills on this machine: KILLS=500, at most MINUTES=60; results add up, Ctrl-C keeps them
	$(BIN)/python -m tests.faults.kills --kills $(KILLS) --minutes $(MINUTES) $(SOAK_ARGS)

soak-tiers: $(READY) ## on a kind cluster: 200 random faults over all tiers, and what is long and rare
	$(BIN)/python -m pytest -m soak tests/soak tests/sidecar/test_leader_lost.py -s $(PYTEST_ARGS)

attacks: $(READY) ## make the hostile files in attacks/ again
	$(BIN)/python attacks/make.py

fuzz: MINUTES = 5
fuzz: $(READY) ## fuzz every parser for MINUTES=5; adds its counts to docs/fuzz.json
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

clean: ## remove the virtual environment and whatever tests left
	rm -rf $(VENV) .venv-torch-* $(FRAMEWORKS) .venv-docs build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# a peer that cannot be had or built is missing in the report, which says why
build/peers/.ready: $(READY) requirements-peers.txt
	@mkdir -p $(@D)
	-$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target $(@D)/site -r requirements-peers.txt
	@echo "compiling DeepSpeed's async_io (some minutes)"
	-@PYTHONPATH=$(@D)/site PATH=$(CURDIR)/$(@D)/site/bin:$$PATH TORCH_EXTENSIONS_DIR=$(CURDIR)/$(@D)/extensions DS_ACCELERATOR=cpu \
		$(BIN)/python -c "from deepspeed.ops.op_builder import AsyncIOBuilder as one; one().load(verbose=False)" 2>$(@D)/deepspeed.log
	@touch $@

# the tools of a release are locked, too: with its rights, one bad package publishes what it likes
build/lock/.ready: scripts/tools.lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/pip install -q --disable-pip-version-check --require-hashes -r scripts/tools.lock
	@touch $@

build/dist-tools/.ready: lib/requirements.lock scripts/tools.lock
	@$(PYTHON) -m venv build/dist-tools
	@build/dist-tools/bin/pip install -q --disable-pip-version-check --require-hashes -r lib/requirements.lock
	@build/dist-tools/bin/pip install -q --disable-pip-version-check --require-hashes -r scripts/tools.lock
	@touch $@
