"""One module a peer: what runs as its servers, and how its callers reach them."""
