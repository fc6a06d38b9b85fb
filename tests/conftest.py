"""What every test starts from."""

import signal


def pytest_configure() -> None:
    # Shells start what runs in the background with interrupts ignored, which tests of interrupts, and processes that
    # they start, would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
