"""The dashboard: one page without assets of others, which reads GET /admin/overview."""
