"""The viewer of runs: an HTTP server on loopback, and the pages that it serves."""
