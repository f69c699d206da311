"""Convert between the Responses API, Chat Completions and Anthropic's Messages.

All functions take and return plain JSON objects. *Outbound* conversions turn a Responses request into the body for a
model's server and the server's answer into a Response. *Inbound* conversions turn the body of a client into a
Responses request and a Response into the answer that the client expects.
"""
