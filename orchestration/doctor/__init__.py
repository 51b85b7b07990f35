"""``splitserve doctor``: facts of a machine, a spec and a running cluster, and their judgement."""
