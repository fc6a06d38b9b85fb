"""Model families, one module each, found by listing this folder: see profiler.core.registry.Family."""
