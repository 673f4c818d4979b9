"""These tests need the libraries that they are about, and fail without them: `make test-adapters` makes the
environments."""
