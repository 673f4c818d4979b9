"""What stands between a coroutine and an engine, and what it costs: zagent beside its peers, on the same traffic."""
