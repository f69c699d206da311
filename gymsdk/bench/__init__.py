"""Benches: what served environments cost and bear, asked in a closed loop."""
