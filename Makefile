.PHONY: setup check test demo format

setup:
	scripts/setup

check:
	scripts/check

test:
	scripts/test

demo:
	scripts/demo

format: setup
	.venv/bin/ruff format
	.venv/bin/ruff check --fix
