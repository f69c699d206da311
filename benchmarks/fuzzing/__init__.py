"""What `fuzz.py` consists of: mutations of requests, the servers with their valid requests, and the client."""
