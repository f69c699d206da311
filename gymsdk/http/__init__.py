"""HTTP requests to other servers: the client, its errors, TLS trust and decompression."""
