"""Programs that count, without a clock: bytes, launches, waits, and what grows with the ranks."""
