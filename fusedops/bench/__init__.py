"""``fusedops bench``: every op beside its peers and the floors of the machine, in one process."""
