"""Scripts that run under the engine's interpreter. They have a folder of their own: a script's folder leads its module path,
and a neighbour called `http.py` would take the standard library's place."""
