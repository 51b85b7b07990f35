"""Traces of requests in OpenTelemetry's form: context from and to clients, spans made of timelines, export."""
