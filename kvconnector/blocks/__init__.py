"""KV blocks: states, references, generations, the prefix index, events, digests. Pure."""
