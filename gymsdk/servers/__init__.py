"""The servers: peers that are an app, and what they share."""
