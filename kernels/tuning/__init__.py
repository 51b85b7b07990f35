"""Launch parameters: the files they come from, and the operations that ``splitserve tune`` can tune."""
