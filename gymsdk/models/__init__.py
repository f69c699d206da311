"""The adapters: peers that answer a Responses request, each for one kind of model, and the registry of them."""
