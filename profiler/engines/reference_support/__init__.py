"""Parts of the reference engine: weights, and the call that measures each component."""
