"""A research framework for RL with verifiable rewards, built on one number."""
