"""The plugins of environments: hooks, default implementations, calls of hooks, and installed environments."""
