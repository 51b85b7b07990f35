"""Options, reports and statistics that benches share."""
