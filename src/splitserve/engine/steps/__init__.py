"""Steps beside the loop: their executor, when one is launched, how long it takes."""
