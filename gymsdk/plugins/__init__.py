"""The contract of an environment, the stack of plugins that answers it, and where plugins are found."""
