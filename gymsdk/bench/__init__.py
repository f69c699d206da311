"""Measure the throughput, latency, CPU and memory of served environments under load."""
