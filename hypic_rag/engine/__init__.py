"""The engine: encoding segments, assembling requests, decoding."""
