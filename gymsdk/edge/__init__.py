"""The edge of a server: sockets, connections, authentication, limits, bodies and errors of HTTP requests."""
