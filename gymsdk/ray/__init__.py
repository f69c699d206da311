"""Ray: join a cluster or start one, run offloaded functions on it, and place replicas of servers on its nodes.

This package needs the extra `gymsdk[ray]`. No other part of gymsdk imports Ray.
"""
