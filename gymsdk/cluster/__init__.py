"""Who is there and who answers: instances, their registry and reports, and the forwarding of requests between them."""
