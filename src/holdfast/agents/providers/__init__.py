"""Models of every provider, through pydantic-ai's model layer (extra ``models``)."""
