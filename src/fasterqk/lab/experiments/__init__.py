"""One file for each figure or table of the paper: which runs, which summary."""
