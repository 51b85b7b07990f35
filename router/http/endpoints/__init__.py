"""Endpoints beside completions and chat: tokens in and out, responses, messages."""
