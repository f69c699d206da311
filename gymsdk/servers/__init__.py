"""The servers: resources server, agent server, model server, environment server and head, and the parts they share."""
