# Everything runs inside .venv, which the first command makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := smollm2-135m

.PHONY: help demo test check format bench certificates verification identity tables clean

help:
	@echo "make demo    see speculative decoding at work, on a small model that is fetched"
	@echo "make test    run all tests"
	@echo "make check   ruff and mypy"
	@echo "make format  let ruff fix what it can"
	@echo "make bench   methods side by side on this machine, with a report; some minutes"
	@echo "make certificates   of every drafter that comes with Forerun; an hour, and can be interrupted"
	@echo "make verification   time the verification rules on this machine"
	@echo "make identity DATA=folder   is the text the target's own? on development sets, against transformers"
	@echo "make tables  write the tables of the documents from results/"
	@echo "make clean   remove the environment"

# $@ is touched last, so that an interrupted install starts again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Forerun needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "This Python cannot make environments. On Debian: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) (once; about two minutes, most of it PyTorch)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/forerun demo

test: $(READY)
	@$(BIN)/forerun models fetch $(MODEL)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m benchmarks.tables --check

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# After Ctrl-C: make bench RESUME=--resume
bench: $(READY)
	@$(BIN)/forerun models fetch $(MODEL)
	@$(BIN)/forerun bench --model $(MODEL) --drafters none,ngram,suffix,recycling,combine,eagle3 --batch 1,8 \
		--per-category 1 --turns 1 --max-tokens 36 --repeat 2 \
		--json results/quick-bench.json --report results/quick-bench.html $(RESUME); \
		code=$$?; $(BIN)/python -m benchmarks.tables && exit $$code

certificates: $(READY)
	@$(BIN)/forerun models fetch $(MODEL)
	@$(BIN)/python -m benchmarks.certificates $(if $(DRAFTERS),--drafters $(DRAFTERS)); \
		code=$$?; $(BIN)/python -m benchmarks.tables && exit $$code

verification: $(READY)
	@$(BIN)/python -m benchmarks.verification --out results/verification-cpu.json
	@$(BIN)/python -m benchmarks.tables

identity: $(READY)
	@$(BIN)/python -m benchmarks.identity --data $(DATA) --out results/identity.json
	@$(BIN)/python -m benchmarks.tables

tables: $(READY)
	@$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV)
