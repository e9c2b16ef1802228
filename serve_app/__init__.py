"""The service: an OpenAI-shaped endpoint on Ray Serve that answers over stored, compressed documents."""
