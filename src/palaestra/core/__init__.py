"""What every layer shares: types, errors, clock. No I/O happens here."""
