"""Room 7: what a rollout goes through, and what it leaves behind."""
