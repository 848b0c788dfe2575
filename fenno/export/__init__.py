"""Production files from a recipe: pure functions to text, one module a format."""
