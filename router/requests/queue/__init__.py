"""The queue of requests before their placement: classes, tenants, fair order, predicted waits. Pure."""
