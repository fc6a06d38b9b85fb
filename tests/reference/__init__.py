"""The slow, obvious scheduler: objects, lists and one straight loop. It is the specification of serving/core."""
