"""The fault simulator: production state machines of router and workers under virtual time and seeded faults.

Time, network, clients, devices and copies are simulated; every decision is made by the production cores. A violated
invariant raises ``AssertionError``.
"""
