"""The HTTP edge: connections, bodies, endpoints, answers, errors in OpenAI's shape."""
