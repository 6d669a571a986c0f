"""A fuzzing campaign: random calls of every op, held to independent references."""
