"""What it takes and whether it pays: machines, passes, training runs, plans."""
