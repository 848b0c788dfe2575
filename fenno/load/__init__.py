"""Traffic: what to send (`plan`), how it is sent and read (`sender/`, `sse`, `reply`), what came of it (`record`, `stats`).

`run` is the door: it starts locust in a child process and reads its records. `calibration` measures this host's own error.
"""
