"""How cost grows: with engines, sessions, calls in flight and trajectories; where the one broker saturates."""
