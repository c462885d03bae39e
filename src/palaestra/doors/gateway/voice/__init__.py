"""Voice messages: speech to text for incoming ones, and text to speech for answers."""
