"""The model's output as parts of a message: reasoning, content, tool calls, by response templates."""
