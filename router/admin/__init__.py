"""Views of the running cluster for operators: metrics, the cluster report, profiles."""
