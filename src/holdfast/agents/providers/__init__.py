"""Models of all providers that pydantic-ai supports (extra ``models``)."""
