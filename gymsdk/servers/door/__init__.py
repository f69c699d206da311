"""Door: who is let in, and what lies before a server's routes."""
