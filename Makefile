.PHONY: setup check test long-test demo format

setup:
	scripts/setup

check:
	scripts/check

test:
	scripts/test

# Matrices that take long: make long-test NAME=schedules (or messages, http, slow)
long-test: setup
	scripts/long-tests $(NAME)

demo:
	scripts/demo

format: setup
	.venv/bin/ruff format
	.venv/bin/ruff check --fix
