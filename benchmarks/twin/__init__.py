"""Commands on the twin of a cluster: simulate a workload, calibrate the models, plan an arrangement."""
