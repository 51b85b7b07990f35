"""Log-probabilities of answers: in the forms that clients expect, with the prompt echoed before the output."""
