"""Logging, metrics, health checks and the status of a deployment."""
