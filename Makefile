# One command each: `make run` opens the page, `make test` passes the tests, `make check` is what CI and reviewers expect.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: run test check install install-dev

run: install
	$(BIN)/python app.py

test: install-dev
	$(BIN)/python -m pytest tests

check: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(VENV)/installed: requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@
