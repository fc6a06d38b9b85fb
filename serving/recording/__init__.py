"""Recording a real engine: the driver, its step log, and the files that `compare` and `replay` read."""
