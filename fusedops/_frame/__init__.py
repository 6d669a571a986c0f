"""Choice of backends, calls and their derivatives: all that the ops have in common."""
