"""The ranks of a tensor-parallel worker: started, driven and watched by rank 0."""
