"""Kills, stops and slows the processes of a cluster under load, and checks that nothing is lost."""
