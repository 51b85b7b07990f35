"""Child processes of the router, which render chat templates, tokenise texts and check grammars beside its event loop:
what takes too long there, or too much memory, ends its process alone.
"""
