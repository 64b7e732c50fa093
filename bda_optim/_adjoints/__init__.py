"""Room 5: how the backward pass of a rollout is obtained."""
