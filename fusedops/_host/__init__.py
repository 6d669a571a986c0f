"""The resources of the machine: cores, threads, and memory."""
