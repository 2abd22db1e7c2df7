"""From measurements to verdicts: claims and their rules, survival, heads that take off, words."""
