"""Tools that not every agent has: browser, web, pictures and sound, memory, skills, training runs."""
