"""Will it fit, and how fast can it be at best: from a config.json, before anything is downloaded. Arithmetic, no measurement."""
