"""`palaestra gateway`: one service for many conversations, on chat platforms, e-mail and HTTP."""
