"""Launch parameters: their files, and the operations that ``splitserve tune`` can tune."""
