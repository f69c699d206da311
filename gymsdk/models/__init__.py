"""Model adapters, which answer Responses requests, and the registry that builds them from names."""
