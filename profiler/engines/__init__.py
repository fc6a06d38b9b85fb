"""Who runs a kernel: one module per engine (`create(options) -> Engine`); see base.py."""
