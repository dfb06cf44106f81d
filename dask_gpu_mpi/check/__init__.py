"""The command `check`: a real start, then tasks on its workers, rules that judge their results, one report."""
