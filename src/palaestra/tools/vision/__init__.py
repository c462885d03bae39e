"""Looking at images: `images` knows what is one, `asking` puts a question about one to a model that sees."""
