"""The faces: peers that are each one API as a server speaks it, translated to Responses and back."""
