"""Sessions: the episodes that clients have open, and the rows they bring."""
