.PHONY: setup check test slow-test fuzz fuzz-messages fuzz-http demo format

setup:
	scripts/setup

check:
	scripts/check

test:
	scripts/test

# Those that are left out otherwise, since they take long and others are much like them.
slow-test: setup
	SPLITSERVE_SLOW_TESTS=1 .venv/bin/python -m pytest -q -m slow

# Random schedules of the fault simulator: make fuzz SCHEDULES=1000000 FIRST=0
fuzz: setup
	.venv/bin/python tests/support/schedules.py --fuzz $(or $(SCHEDULES),1000000) --first $(or $(FIRST),0)

# Hostile messages and hostile HTTP; NUMBER of each, from SEED on
fuzz-messages: setup
	SPLITSERVE_FUZZ_MESSAGES=$(or $(NUMBER),100000) SPLITSERVE_FUZZ_SEED=$(or $(SEED),0) \
		.venv/bin/python -m pytest -q tests/engine/test_fuzz_messages.py tests/end_to_end/test_fuzz_sockets.py

fuzz-http: setup
	SPLITSERVE_FUZZ_REQUESTS=$(or $(NUMBER),10000) SPLITSERVE_FUZZ_SEED=$(or $(SEED),0) \
		.venv/bin/python -m pytest -q tests/router/test_fuzz_http.py

demo:
	scripts/demo

format: setup
	.venv/bin/ruff format
	.venv/bin/ruff check --fix
