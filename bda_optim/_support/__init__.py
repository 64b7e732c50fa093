"""Room 1: what every other room uses, and what knows nothing of inner loops."""
