"""Wire: what goes to and fro: bodies, documents, tools, and the protocols they belong to."""
