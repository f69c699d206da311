"""Deployments: plan the servers, start them in one process or in separate ones, and supervise them."""
