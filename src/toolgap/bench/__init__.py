"""The benchmark: arms, trials, evidence, verification."""
