.PHONY: setup check test fuzz demo format

setup:
	scripts/setup

check:
	scripts/check

test:
	scripts/test

# Random schedules of the fault simulator: make fuzz SCHEDULES=1000000 FIRST=0
fuzz: setup
	.venv/bin/python tests/schedules.py --fuzz $(or $(SCHEDULES),1000000) --first $(or $(FIRST),0)

demo:
	scripts/demo

format: setup
	.venv/bin/ruff format
	.venv/bin/ruff check --fix
